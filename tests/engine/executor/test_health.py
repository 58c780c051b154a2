"""Who watches others has patience by a clock that stands while it is held up itself."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from starling_engine.errors import RankLost
from starling_engine.executor import health
from starling_engine.executor.health import ExecutorHealth, RemoteRanks
from starling_engine.topology.layout import ParallelLayout
from starling_engine.worker.counters import ProgressCount, ProgressCounters
from starling_engine.worker.messages import heartbeat_identity

PATIENCE = 0.15


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteRanks]:
    """Rank 1 of another node, which is connected and has sent one heartbeat."""
    monkeypatch.setattr(health, "LONGEST_LOOK", 0.1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as rank:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://ranks")
        rank.setsockopt(zmq.IDENTITY, heartbeat_identity(1))
        rank.connect("inproc://ranks")
        rank.send(b"")
        assert router.poll(60_000)
        router.recv_multipart()
        made = RemoteRanks(router, range(1, 2), PATIENCE)
        made.on_heartbeat(1, ProgressCount(0, 0, 0))
        yield made


@pytest.fixture
def executor(remote: RemoteRanks, tmp_path: Path) -> ExecutorHealth:
    counters = ProgressCounters(tmp_path / "progress", 2)
    return ExecutorHealth(ParallelLayout(pipeline=2), counters, remote, PATIENCE, lambda _: None, dp_sync=False)


def goes_on_after_a_stall_but_not_for_ever(look: Callable[[], None], error: str) -> None:
    time.sleep(2 * PATIENCE)
    look()
    with pytest.raises(RankLost, match=error):
        while True:
            look()
            time.sleep(0.01)


def test_silence_of_a_rank_of_another_node(remote: RemoteRanks) -> None:
    goes_on_after_a_stall_but_not_for_ever(remote.check, "rank 1 on another node has not been heard of for 0.15 s")


def test_steps_that_stand_still(executor: ExecutorHealth) -> None:
    executor.begin()
    goes_on_after_a_stall_but_not_for_ever(
        lambda: executor.check_progress(stepping=True, awaiting=False), "rank 0 made no progress for 0.15 s"
    )
