"""A step that fails where the ranks of other cores take it too."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from starling_engine.errors import RankLost
from starling_engine.expert_parallel.dp_sync import SyncDecision
from starling_engine.step import StepPlan, StepResult
from starling_engine.topology.shard import Shard
from starling_engine.worker.counters import ProgressCounters
from starling_engine.worker.messages import Executed
from starling_engine.worker.process.dp_sync_loop import DpSyncLoop


def together(ranks: int, sent: list[Any]) -> DpSyncLoop:
    """A rank whose next step fails, and which shares an epoch with `ranks`."""
    plan = StepPlan(3, 0, [], [], [], [], [], [], inputs=[])
    rank = object.__new__(DpSyncLoop)
    failed = StepResult(plan.step_id, 0, [], error="MemoryError: no more")
    rank._worker = SimpleNamespace(attempt=lambda _: failed, samples=True)  # type: ignore[assignment]
    rank._steps = SimpleNamespace(  # type: ignore[assignment]
        epoch=SimpleNamespace(ranks=SimpleNamespace(shard=Shard(0, ranks))), turn=lambda **_: SyncDecision.RUN, step=1, said=None
    )
    rank._balancing = SimpleNamespace(says=lambda: (0, 0), hear=lambda *_: None)  # type: ignore[assignment]
    rank._counters, rank._rank, rank._send = ProgressCounters(None, 1), 0, sent.append
    rank._plans = deque([plan])
    return rank


def test_ranks_that_share_the_step_must_not_go_on() -> None:
    """Their exchanges no longer match: they would give wrong tokens without a word."""
    sent: list[Any] = []
    with pytest.raises(RankLost, match="rank 0 failed within a step that others share: MemoryError: no more"):
        together(2, sent)._turn()
    assert not sent


def test_a_rank_alone_tells_of_it() -> None:
    sent: list[Any] = []
    together(1, sent)._turn()
    assert [type(message) for message in sent] == [Executed] and sent[0].result.error == "MemoryError: no more"
