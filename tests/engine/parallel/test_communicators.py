"""Ranks that talk: through gloo's sockets and through shared memory."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from starling_engine import native
from starling_engine.errors import ConfigError, RankLost
from starling_engine.parallel.communicator import ALONE, Communicator, SingleRank, call_group, no_tick
from starling_engine.parallel.gloo import GlooCommunicator, join_store, serve_store
from starling_engine.parallel.shared_memory import BUFFER_BYTES, SHARED_FOLDER, SharedMemoryCommunicator
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

from tests.engine.parallel.threads import KINDS, on_ranks


def numbers(ranks: Communicator, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + ranks.shard.index))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [1, 17, 4096, 2 * BUFFER_BYTES // 4 + 5])
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
@pytest.mark.parametrize("size", [3, BUFFER_BYTES + 7])
def test_all_gather_keeps_the_order_of_the_ranks(kind: str, dtype: torch.dtype, size: int) -> None:
    gathered = on_ranks(2, kind, lambda ranks: ranks.all_gather((numbers(ranks, size) * 100).to(dtype).view(1, size)))
    expected = [(torch.randn(size, generator=torch.Generator().manual_seed(i)) * 100).to(dtype).view(1, size) for i in range(2)]
    assert all(torch.equal(found, torch.stack(expected)) for found in gathered)


SOME = [[3, 0, 2], [1, 4, 0], [0, 0, 0]]
"""Rows that each rank sends to each; the last one sends none."""
MANY = [[1, BUFFER_BYTES // 40, 5], [BUFFER_BYTES // 30, 0, BUFFER_BYTES // 9], [7, 0, 1]]
"""Rows of 28 bytes: more than fits into shared memory at once."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("sizes", [SOME, MANY, [[0] * 3] * 3], ids=["some", "many", "none"])
def test_each_rank_gets_what_is_meant_for_it(kind: str, dtype: torch.dtype, sizes: list[list[int]]) -> None:
    def rows(source: int, to: int) -> torch.Tensor:
        return (torch.arange(sizes[source][to] * 7).view(-1, 7) * (2 * source + 1) + to).to(dtype)

    def work(ranks: Communicator) -> list[torch.Tensor]:
        me = ranks.shard.index
        received = [row[me] for row in sizes]
        x = torch.cat([rows(me, to) for to in range(3)])
        return [ranks.all_to_all(x, sizes[me], received)() for _ in range(3)]

    for me, found in enumerate(on_ranks(3, kind, work)):
        assert all(torch.equal(each, torch.cat([rows(source, me) for source in range(3)])) for each in found)


def test_alone_a_rank_gets_what_it_sends() -> None:
    assert torch.equal(ALONE.all_to_all(torch.ones(3, 2), [3], [3])(), torch.ones(3, 2))


@pytest.mark.skipif(native.load() is None, reason="no native kernels")
def test_ranks_that_disagree_about_what_is_sent_do_not_go_on() -> None:
    def work(ranks: Communicator) -> None:
        ranks.all_to_all(torch.ones(2, 4), [1, 1], [1, 1 + ranks.shard.index])()

    with pytest.raises(AssertionError, match="another number of rows"):
        on_ranks(2, "shared", work, timeout=1.0)


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


EXCHANGES: list[Callable[[Communicator], object]] = [
    lambda ranks: ranks.all_reduce(torch.ones(8)),
    lambda ranks: ranks.all_to_all(torch.ones(3, 1), [1] * 3, [1] * 3)(),
]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=["all_reduce", "all_to_all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_it_may(
    kind: str, exchange: Callable[[Communicator], object]
) -> None:
    def work(ranks: Communicator) -> None:
        if ranks.shard.index != 1:
            exchange(ranks)

    # gloo's ranks have to meet in that time first, on a machine that does other things too.
    with pytest.raises(RankLost, match="rank 1 of 3 did not come within 3 s" if kind == "shared" else "gone or stuck"):
        on_ranks(3, kind, work, timeout=3.0)


@pytest.mark.parametrize(
    "exchange",
    [
        *EXCHANGES[:1],
        lambda ranks: ranks.all_gather(torch.ones(8)),
        lambda ranks: ranks.all_to_all(torch.ones(2, 1), [1, 1], [1, 1])(),
        lambda ranks: ranks.receive(torch.ones(8), 1),
        lambda ranks: [ranks.send(torch.ones(8), 1) for _ in range(20)],
    ],
    ids=["all_reduce", "all_gather", "all_to_all", "receive", "send"],
)
def test_a_rank_that_has_gone_is_lost_however_often_it_is_asked(exchange: Callable[[Communicator], object]) -> None:
    """gloo raises in the wait for the first exchange, and at once in later ones."""

    def work(ranks: Communicator) -> None:
        for _ in range(3 if ranks.shard.first else 0):
            with pytest.raises(RankLost, match="gone or stuck"):
                exchange(ranks)

    on_ranks(2, "gloo", work, timeout=3.0)


def test_a_fault_of_the_own_device_is_not_another_ranks() -> None:
    def breaks() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        call_group(breaks)


def test_a_group_that_never_meets() -> None:
    store = serve_store("127.0.0.1", 1.0)
    place = Rendezvous("127.0.0.1", store.port, "127.0.0.1", 1.0)
    with pytest.raises(RankLost, match="did not all come"):
        GlooCommunicator(join_store(place), "all", Shard(0, 2), place, no_tick)


def test_without_a_store_there_is_no_group() -> None:
    with pytest.raises(RankLost, match=r"no rendezvous at 127\.0\.0\.1:9"):
        join_store(Rendezvous("127.0.0.1", 9, "127.0.0.1", 1.0))


def test_a_store_that_has_stopped_is_waited_for_no_longer_than_it_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(RankLost, match=rf"no rendezvous at 127\.0\.0\.1:{port}: no answer within 0.5 s"):
            join_store(Rendezvous("127.0.0.1", port, "127.0.0.1", 0.5))


@pytest.mark.skipif(native.load() is None, reason="no native kernels")
def test_shared_memory_leaves_no_file_behind() -> None:
    def mine() -> set[Path]:
        return set(SHARED_FOLDER.glob("starling-*"))

    before = mine()
    on_ranks(2, "shared", lambda ranks: ranks.all_reduce(torch.ones(1)))
    assert mine() <= before


class FirstOfTwo(SingleRank):
    shard = Shard(0, 2)


@pytest.mark.skipif(native.load() is None, reason="no native kernels")
def test_no_room_to_share_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=rf"no room in {SHARED_FOLDER} for \d+ bytes that ranks share.*No space left"):
        SharedMemoryCommunicator(FirstOfTwo(), 1.0)
