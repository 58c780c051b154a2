"""A step that fails on one rank while ranks of other cores run it too."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from starling_engine.errors import RankLost
from starling_engine.expert_parallel.dp_sync import NO_VOTE, SyncDecision
from starling_engine.step import StepPlan, StepResult
from starling_engine.topology.shard import Shard
from starling_engine.worker.counters import ProgressCounters
from starling_engine.worker.messages import Executed
from starling_engine.worker.process.dp_sync_loop import DpSyncLoop


def failing_rank(ranks: int, sent: list[Any]) -> DpSyncLoop:
    """Returns one of the `ranks` ranks of an epoch; its next step fails."""
    plan = StepPlan(3, 0, [], [], [], [])
    rank = object.__new__(DpSyncLoop)
    failed = StepResult(plan.step_id, 0, error="MemoryError: no more")
    rank._worker = SimpleNamespace(attempt=lambda _: failed, samples=True)  # type: ignore[assignment]
    rank._sync = SimpleNamespace(  # type: ignore[assignment]
        epoch=SimpleNamespace(communicator=SimpleNamespace(shard=Shard(0, ranks))),
        sync=lambda **_: SyncDecision.RUN,
        step=1,
        votes=None,
    )
    rank._eplb = SimpleNamespace(vote=lambda: NO_VOTE, act=lambda *_: None)  # type: ignore[assignment]
    rank._counters, rank._rank, rank._send = ProgressCounters(None, 1), 0, sent.append
    rank._plans = deque([plan])
    return rank


def test_ranks_that_share_the_step_must_not_go_on() -> None:
    """Their exchanges no longer match: they would give wrong tokens silently."""
    sent: list[Any] = []
    with pytest.raises(RankLost, match="rank 0 failed within a step that others share: MemoryError: no more"):
        failing_rank(2, sent)._step()
    assert not sent


def test_a_rank_alone_reports_the_failure() -> None:
    sent: list[Any] = []
    failing_rank(1, sent)._step()
    assert [type(message) for message in sent] == [Executed] and sent[0].result.error == "MemoryError: no more"
