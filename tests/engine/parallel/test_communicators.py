"""Ranks that talk: through gloo's sockets and through shared memory. Each is a thread here; the kernels and gloo let others run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from starling_engine import native
from starling_engine.errors import ConfigError, RankLost
from starling_engine.models.context import no_tick
from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.gloo import GlooCommunicator, join_store, serve_store
from starling_engine.parallel.rendezvous import Rendezvous
from starling_engine.parallel.shard import Shard
from starling_engine.parallel.shared import SHARED_FOLDER, SLOT_BYTES, SharedCommunicator

T = TypeVar("T")
KINDS = [
    "gloo",
    pytest.param("shared", marks=pytest.mark.skipif(native.load() is None, reason="no native kernels")),
]


def on_ranks(count: int, kind: str, work: Callable[[Communicator], T], timeout: float = 20.0) -> list[T]:
    """What `work` gives on each rank. The first error that a rank raises is raised."""
    store = serve_store("127.0.0.1", timeout)
    place = Rendezvous("127.0.0.1", store.port, "127.0.0.1", timeout)

    def rank(index: int) -> T:
        slow = GlooCommunicator(join_store(place), "all", Shard(index, count), place, no_tick)
        return work(SharedCommunicator(slow, timeout) if kind == "shared" else slow)

    with ThreadPoolExecutor(count) as threads:
        return [future.result() for future in [threads.submit(rank, index) for index in range(count)]]


def numbers(ranks: Communicator, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + ranks.shard.index))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [1, 17, 4096, 2 * SLOT_BYTES // 4 + 5])
def test_all_ranks_have_the_same_sum(kind: str, count: int, size: int) -> None:
    sums = on_ranks(count, kind, lambda ranks: ranks.all_reduce(numbers(ranks, size)))
    expected = sum(torch.randn(size, generator=torch.Generator().manual_seed(i)) for i in range(count))
    torch.testing.assert_close(sums[0], expected)
    assert all(torch.equal(other, sums[0]) for other in sums[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_sums_follow_one_another(kind: str) -> None:
    """Slots are used again and again: a late reader must not find the next round's numbers."""

    def work(ranks: Communicator) -> list[float]:
        return [float(ranks.all_reduce(torch.full((64,), float(i + ranks.shard.index))).max()) for i in range(2000)]

    assert on_ranks(2, kind, work) == [[2.0 * i + 1 for i in range(2000)]] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("size", [3, SLOT_BYTES + 7])
def test_all_gather_keeps_the_order_of_the_ranks(kind: str, dtype: torch.dtype, size: int) -> None:
    gathered = on_ranks(2, kind, lambda ranks: ranks.all_gather((numbers(ranks, size) * 100).to(dtype).view(1, size)))
    expected = [(torch.randn(size, generator=torch.Generator().manual_seed(i)) * 100).to(dtype).view(1, size) for i in range(2)]
    assert all(torch.equal(found, torch.stack(expected)) for found in gathered)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_comes_in_order(kind: str) -> None:
    def work(ranks: Communicator) -> list[float]:
        if ranks.shard.first:
            for i in range(20):
                ranks.send(torch.full((1000,), float(i)), 1)
        received = [] if ranks.shard.first else [float(ranks.receive(torch.empty(1000), 0)[-1]) for _ in range(20)]
        ranks.all_reduce(torch.ones(1))  # so that the sender is not gone before all has come
        return received

    assert on_ranks(2, kind, work)[1] == [float(i) for i in range(20)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_it_may(kind: str) -> None:
    def work(ranks: Communicator) -> None:
        if ranks.shard.first:
            ranks.all_reduce(torch.ones(8))

    with pytest.raises(RankLost):
        on_ranks(2, kind, work, timeout=1.0)


def test_a_group_that_never_meets() -> None:
    store = serve_store("127.0.0.1", 1.0)
    place = Rendezvous("127.0.0.1", store.port, "127.0.0.1", 1.0)
    with pytest.raises(RankLost, match="did not all come"):
        GlooCommunicator(join_store(place), "all", Shard(0, 2), place, no_tick)


def test_without_a_store_there_is_no_group() -> None:
    with pytest.raises(RankLost, match=r"no rendezvous at 127\.0\.0\.1:9"):
        join_store(Rendezvous("127.0.0.1", 9, "127.0.0.1", 1.0))


@pytest.mark.skipif(native.load() is None, reason="no native kernels")
def test_shared_memory_leaves_no_file_behind() -> None:
    def mine() -> set[Path]:
        return set(SHARED_FOLDER.glob("starling-*"))

    before = mine()
    on_ranks(2, "shared", lambda ranks: ranks.all_reduce(torch.ones(1)))
    assert mine() <= before


@pytest.mark.skipif(native.load() is None, reason="no native kernels")
def test_no_room_to_share_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=rf"no room in {SHARED_FOLDER} for \d+ bytes that ranks share.*No space left"):
        on_ranks(2, "shared", lambda ranks: ranks.all_reduce(torch.ones(1)), timeout=1.0)
