"""Ranks that their executor did not start: they join over TCP, as from other nodes, and are watched by what they say."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starling_engine.errors import RankLost
from starling_engine.executor.launcher import WorkerHandle
from starling_engine.parallel import shared_memory
from starling_engine.parallel.communicator import ALONE
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import PROMPT, VARIANTS, Reference, make_reference
from tests.engine.cores import assert_greedy, core_for, greedy, run

TOKENS = list(range(PROMPT))
LAYOUTS = [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(pipeline=2, tensor=2)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS["qwen3"])


@pytest.fixture
def workers() -> Iterator[list[WorkerHandle]]:
    started: list[WorkerHandle] = []
    yield started
    for worker in started:
        worker.close()


def starts(workers: list[WorkerHandle], layout: ParallelLayout, wait: float = 0.0) -> Callable[[str], None]:
    """All ranks but the first, as the agents of their nodes would."""

    def start(address: str) -> None:
        time.sleep(wait)
        workers.extend(WorkerHandle(address, rank, "127.0.0.1") for rank in range(1, layout.world_size))

    return start


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_tokens_as_transformers(reference: Reference, workers: list[WorkerHandle], layout: ParallelLayout) -> None:
    with core_for(reference.folder, layout=layout, elsewhere=starts(workers, layout), patience=20.0) as core:
        tokens, error = run(core, [greedy("a", reference.prompt)])["a"]
        assert error is None
        assert_greedy(tokens, reference)
        assert core.executor.progress > 0
        assert [list(rank) for rank in core.start_seconds] == [["init", "load", "allocate", "warm up"]] * layout.world_size
        assert len({rank["load"] for rank in core.start_seconds}) == layout.world_size, "each its own"
        assert all(worker.alive for worker in workers)
    deadline = time.monotonic() + 60
    while any(worker.alive for worker in workers):
        assert time.monotonic() < deadline, "workers end with their executor"
        time.sleep(0.05)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGKILL, "is gone: its connection ended"),
        (signal.SIGSTOP, r"has not been heard of for 2 s|made no progress for 2 s"),
    ],
    ids=["dies", "hangs"],
)
def test_a_rank_of_another_node_that_dies_or_hangs_is_named(
    reference: Reference, workers: list[WorkerHandle], how: signal.Signals, said: str, busy: bool
) -> None:
    layout = ParallelLayout(pipeline=2)
    with core_for(reference.folder, layout=layout, elsewhere=starts(workers, layout), patience=2.0) as core:
        if busy:
            assert core.add(greedy("long", TOKENS)) is None
            for _ in range(3):
                core.step()
        os.kill(workers[0].pid, how)
        began = time.monotonic()
        with pytest.raises(RankLost, match=rf"^rank 1 .*({said})"):
            while True:
                core.executor.check()
                core.step()
        assert time.monotonic() - began < 30


def test_ranks_of_other_nodes_may_come_late(reference: Reference, workers: list[WorkerHandle]) -> None:
    """Later than ranks wait for each other once they have started."""
    layout = ParallelLayout(tensor=2)
    with core_for(reference.folder, layout=layout, elsewhere=starts(workers, layout, wait=5.0), patience=3.0) as core:
        assert run(core, [greedy("a", TOKENS)])["a"][1] is None


def test_memory_is_shared_only_where_the_folder_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Two:
        """Two ranks that know the other's identity."""

        shard = ALONE.shard

        def __init__(self, other: bytes) -> None:
            self.other = torch.frombuffer(bytearray(other), dtype=torch.uint8)

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x, self.other])

        def __getattr__(self, name: str) -> Any:
            return getattr(ALONE, name)

    own = shared_memory._identity()
    assert shared_memory.can_share_memory(Two(own))
    monkeypatch.setattr(shared_memory, "shared_folder", lambda: Path("/proc"))
    assert not shared_memory.can_share_memory(Two(own)), "another mounted file system"
