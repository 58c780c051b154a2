"""A worker's threads for the tiers outside."""

import queue
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from starling_engine.delta import TierStats
from starling_engine.errors import RankLost
from starling_engine.kv_offload import transfers as transfers_module
from starling_engine.kv_offload.arena import Arena, GroupPages
from starling_engine.kv_offload.orders import ChunkSlot, TierStatus, TransferDone, TransferOrder
from starling_engine.kv_offload.secondary.base import Chunk
from starling_engine.kv_offload.secondary.tiers import SecondaryTiers
from starling_engine.kv_offload.transfers import THREADS, TransferThreads


class Hung(SecondaryTiers):
    """Has everything, and takes nothing before `go`; with `reads`, gives nothing either."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__([], [])
        self.go = threading.Event()
        self._reads = reads
        self.began = threading.Semaphore(0)
        """Released by each read and each write."""

    def reports(self) -> dict[str, TierStats]:
        return {}

    def lookup(self, chunks: Sequence[Chunk]) -> list[bool]:
        return [True] * len(chunks)

    def read(self, _chunk: Chunk, _into: memoryview) -> bool:
        self.began.release()
        return self.go.wait(30) if self._reads else True

    def write(self, _chunk: Chunk, _data: memoryview) -> bool:
        self.began.release()
        return self.go.wait(30)


@pytest.mark.timeout(60)
def test_reads_do_not_wait_for_writes() -> None:
    far, answers = Hung(), queue.SimpleQueue[TransferDone]()
    transfers = TransferThreads([GroupPages(torch.zeros(1, 1, 64, dtype=torch.uint8), 1)], Arena(40, 64), far, answers.put)
    chunks = [ChunkSlot(slot, 0, bytes([slot])) for slot in range(32)]
    transfers.order(TransferOrder(1, "write_back", chunks))
    for _ in range(THREADS["write_back"]):
        assert far.began.acquire(timeout=60)
    transfers.order(TransferOrder(2, "look_up", chunks))
    transfers.order(TransferOrder(3, "promote", chunks))
    assert {answers.get(timeout=60).job, answers.get(timeout=60).job} == {2, 3}
    far.go.set()
    assert all(answers.get(timeout=60).done), "and then they are written"


@pytest.mark.timeout(60)
def test_looking_does_not_wait_for_reads() -> None:
    far, answers = Hung(reads=True), queue.SimpleQueue[TransferDone]()
    transfers = TransferThreads([GroupPages(torch.zeros(1, 1, 64, dtype=torch.uint8), 1)], Arena(40, 64), far, answers.put)
    chunks = [ChunkSlot(slot, 0, bytes([slot])) for slot in range(32)]
    transfers.order(TransferOrder(1, "promote", chunks))
    for _ in range(THREADS["promote"]):
        assert far.began.acquire(timeout=30)
    transfers.order(TransferOrder(2, "look_up", chunks))
    assert answers.get(timeout=15).job == 2
    far.go.set()
    assert answers.get(timeout=30).job == 1


@pytest.mark.timeout(60)
def test_a_thread_that_dies_ends_its_rank_rather_than_leave_orders_without_an_answer() -> None:
    called = threading.Event()

    def answer(_: TransferDone | TierStatus) -> None:
        called.set()
        raise OSError("the socket is gone")

    before = set(threading.enumerate())
    transfers = TransferThreads([GroupPages(torch.zeros(1, 1, 64, dtype=torch.uint8), 1)], Arena(40, 64), None, answer)
    (thread,) = (each for each in set(threading.enumerate()) - before if each.name == "kv-store")
    transfers.order(TransferOrder(1, "store", []))
    assert called.wait(30)
    thread.join(30)
    with pytest.raises(RankLost, match=r"kv-store .*the socket is gone"):
        transfers.finished(0)


class StuckArena(Arena):
    """Gives no slot before `go`."""

    def __init__(self) -> None:
        super().__init__(1, 64)
        self.asked, self.go = threading.Event(), threading.Event()

    def slot(self, index: int) -> torch.Tensor:
        self.asked.set()
        assert self.go.wait(30)
        return super().slot(index)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_copy_that_hangs_ends_its_rank_and_one_that_is_slow_does_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, answers = StuckArena(), queue.SimpleQueue[TransferDone]()
    transfers = TransferThreads([GroupPages(torch.zeros(1, 1, 64, dtype=torch.uint8), 1)], arena, None, answers.put)
    transfers.order(TransferOrder(1, kind, [ChunkSlot(0, 0, b"", 0, [0])]))
    assert arena.asked.wait(30)
    transfers.finished(0)
    monkeypatch.setattr(transfers_module, "HUNG_SECONDS", 0.0)
    with pytest.raises(RankLost, match=r"kv-(store|load) .*copied one chunk"):
        transfers.finished(1)
    arena.go.set()
    assert answers.get(timeout=30).done == [True]
    transfers.finished(2)


class Costly(SecondaryTiers):
    """Takes processor time for each chunk, here and elsewhere."""

    HERE, ELSEWHERE = 0.02, 0.5

    def __init__(self) -> None:
        super().__init__([], [])
        self.elsewhere = 100.0

    @property
    def cpu_elsewhere(self) -> float:
        return self.elsewhere

    def reports(self) -> dict[str, TierStats]:
        return {}

    def write(self, _chunk: Chunk, _data: memoryview) -> bool:
        end = time.thread_time() + self.HERE
        while time.thread_time() < end:
            pass
        time.sleep(0.05)  # waiting takes nothing from anyone
        self.elsewhere += self.ELSEWHERE
        return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("processors, share", [(0, 0.0), (1, 1.0), (2, 1.0), (8, 0.25)])
def test_what_writing_takes_from_steps_is_told(processors: int, share: float) -> None:
    answers = queue.SimpleQueue[TransferDone | TierStatus]()
    pages = [GroupPages(torch.zeros(1, 1, 64, dtype=torch.uint8), 1)]
    transfers = TransferThreads(pages, Arena(40, 64), Costly(), answers.put, processors=processors)
    for job in range(2):
        transfers.order(TransferOrder(job, "write_back", [ChunkSlot(slot, 0, bytes([slot])) for slot in range(4)]))
        while isinstance(done := answers.get(timeout=30), TierStatus):
            pass
        assert done.seconds >= 4 * 0.05
        assert share * 4 * 0.52 <= done.taken <= share * 4 * 0.56


@pytest.mark.timeout(60)
def test_a_store_waits_for_its_step_on_this_rank() -> None:
    """Another rank has told of the step; this one may not have written its keys and values yet."""
    pages, arena, answers = torch.zeros(1, 1, 64, dtype=torch.uint8), Arena(1, 64), queue.SimpleQueue[TransferDone]()
    transfers = TransferThreads([GroupPages(pages, 1)], arena, None, answers.put)
    transfers.finished(4)
    transfers.order(TransferOrder(1, "store", [ChunkSlot(0, 0, b"", 0, [0])], after=5))
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.2)
    pages.fill_(7)
    transfers.finished(5)
    assert answers.get(timeout=60).done == [True]
    assert arena.slot(0)[:64].tolist() == [7] * 64
