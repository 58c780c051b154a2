"""Moves chunks beside the steps: copies between pages and slots, and between slots and the tiers outside, in threads."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from starling_engine.errors import RankLost
from starling_engine.kv_offload.arena import Arena
from starling_engine.kv_offload.copies import CopyStream, GroupPages, load_chunk, store_chunk
from starling_engine.kv_offload.orders import (
    ChunkSlot,
    LoadChunks,
    LookUpChunks,
    Order,
    PromoteChunks,
    StoreChunks,
    TierStatus,
    TransferDone,
    WriteBackChunks,
)
from starling_engine.kv_offload.secondary.share import SecondaryTiers
from starling_engine.platforms.priority import lower_priority

logger = logging.getLogger("starling.worker")

READERS = WRITERS = 4
"""Reads and writes outside that go on at once, in threads of their own: a write may take 15 s, and requests wait for reads."""
FINDERS = 2
"""Looks that go on at once, apart from reads: each request has one, also where nothing is read."""

HOLDS_UP = 2
"""What steps lose, at most, where something else takes one of their processors: this many times that processor's share, for all
wait for the last one. Measured with two: all the time was lost for which one of them was taken."""

HUNG_SECONDS = 60.0
"""In which a chunk is copied between pages and a slot, by a thread that is alive: it takes milliseconds."""

REPORT_SECONDS = 1.0
"""Between two looks whether the tiers outside stand as before."""

Moving = TypeVar("Moving", StoreChunks, LoadChunks)
Works = queue.SimpleQueue[Callable[[], None]]


class ChunkwiseJob:
    """Chunks of one order, each done by whichever thread is free; the last one answers."""

    def __init__(self, order: PromoteChunks | WriteBackChunks, answer: Callable[[TransferDone], None]) -> None:
        self.order = order
        self._answer = answer
        self._done = [False] * len(order.chunks)
        self._left = len(order.chunks)
        self._seconds = self._cpu_seconds = 0.0
        self._lock = threading.Lock()

    def finish(self, at: int, done: bool, seconds: float, cpu_seconds: float) -> None:
        with self._lock:
            self._done[at] = done
            self._seconds += seconds
            self._cpu_seconds += cpu_seconds
            self._left -= 1
            last = not self._left
        if last:
            self._answer(TransferDone(self.order.job, self._done, self._seconds, taken=self._cpu_seconds))


class TransferThreads:
    """Takes orders and answers each, from any thread to any thread. `finished` tells how far the steps are; `processors` are
    those of the host with which they compute; 0 where they compute on a device of their own.

    Stores and loads are done in the order in which they came, each kind in a thread of its own, which on a GPU has a
    stream of its own.
    """

    def __init__(
        self,
        pages: Sequence[GroupPages],
        arena: Arena,
        far: SecondaryTiers | None,
        answer: Callable[[TransferDone | TierStatus], None],
        first_step: int = 0,
        *,
        processors: int = 0,
    ) -> None:
        self._pages = list(pages)
        self._device = next((layer.device for group in pages for layer in group.layers), torch.device("cpu"))
        self._arena = arena
        self._far = far
        self._answer = answer
        self._per_second = min(1.0, HOLDS_UP / processors) if processors else 0.0
        """What steps lose by a second of a processor's time."""
        self._stores: queue.SimpleQueue[StoreChunks] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[LoadChunks] = queue.SimpleQueue()
        self._finds: Works = queue.SimpleQueue()
        self._reads: Works = queue.SimpleQueue()
        self._writes: Works = queue.SimpleQueue()
        self._step = first_step - 1
        self._stepped = threading.Condition()
        self._closed = threading.Event()
        self._died: str | None = None
        """Which thread ended, and by what."""
        self._copying: dict[str, float] = {}
        """By thread, when the copy of a chunk began that is under way."""
        self._start(self._store, "kv-store")
        self._start(self._load, "kv-load")
        if far is not None:
            self._start(lambda: self._report(far), "kv-report")
            self._start_outside(self._finds, "kv-find", FINDERS)
            self._start_outside(self._reads, "kv-read", READERS)
            self._start_outside(self._writes, "kv-write", WRITERS, nice=True)

    def order(self, order: Order) -> None:
        match order:
            case StoreChunks():
                self._stores.put(order)
            case LoadChunks():
                self._loads.put(order)
            case LookUpChunks():
                self._finds.put(lambda: self._find(order))
            case PromoteChunks():
                self._put_each(self._reads, order, self._fetch)
            case WriteBackChunks():
                self._put_each(self._writes, order, self._keep)

    def finished(self, step_id: int) -> None:
        """That step has run; later ones may have begun.

        Raises RankLost where a thread has died, or hangs in a copy: its orders never end, and their blocks and slots would stay
        taken. To give them to others is no way out, as the copy may still write.
        """
        if self._died is not None:
            raise RankLost(self._died)
        now = time.monotonic()
        for name, began in tuple(self._copying.items()):
            if now - began > HUNG_SECONDS:
                raise RankLost(f"the thread {name} of the KV tiers has copied one chunk for more than {HUNG_SECONDS:g} s")
        with self._stepped:
            self._step = step_id
            self._stepped.notify_all()

    def close(self) -> None:
        self._closed.set()
        if self._far is not None:
            self._far.close()

    # ---- between pages and slots ----

    def _store(self) -> None:
        lower_priority()
        stream = CopyStream(self._device)
        while True:
            self._copy(self._in_time(self._stores.get()), store_chunk, stream)

    def _load(self) -> None:
        stream = CopyStream(self._device)
        while True:
            self._copy(self._in_time(self._loads.get()), load_chunk, stream)

    def _in_time(self, order: Moving) -> Moving:
        """Waits until the step has run after which the order is to be carried out."""
        with self._stepped:
            self._stepped.wait_for(lambda: self._step >= order.after)
        return order

    def _copy(
        self,
        order: StoreChunks | LoadChunks,
        copy: Callable[[GroupPages, list[int], int, torch.Tensor], None],
        stream: CopyStream,
    ) -> None:
        began, done, name = time.perf_counter(), True, threading.current_thread().name
        try:
            with stream:
                for move in order.moves:
                    self._copying[name] = time.monotonic()
                    copy(self._pages[move.group], move.blocks, move.first, self._arena.slot(move.slot))
        except Exception:
            logger.exception("chunks could not be copied")
            done = False
        self._copying.pop(name, None)
        self._answer(TransferDone(order.job, [done] * len(order.moves), time.perf_counter() - began))

    # ---- between slots and the tiers outside ----

    def _put_each(self, works: Works, order: PromoteChunks | WriteBackChunks, work: Callable[[ChunkSlot], bool]) -> None:
        assert self._far is not None, "asked for where there is one"
        before = self._far.cpu_elsewhere
        job = ChunkwiseJob(order, lambda done: self._answer_moved(done, before))
        for at, chunk in enumerate(order.chunks):
            works.put(lambda at=at, chunk=chunk: self._do(job, at, chunk, work))  # type: ignore[misc]

    def _do(self, job: ChunkwiseJob, at: int, chunk: ChunkSlot, work: Callable[[ChunkSlot], bool]) -> None:
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            done = work(chunk)
        except Exception:
            logger.exception("a chunk could not be moved")
            done = False
        job.finish(at, done, time.perf_counter() - began, time.thread_time() - cpu_began)

    def _find(self, order: LookUpChunks) -> None:
        assert self._far is not None, "asked for where there is one"
        began = time.perf_counter()
        try:
            found = self._far.find([(chunk.group, chunk.name) for chunk in order.chunks])
        except Exception:
            logger.exception("chunks could not be looked for")
            found = [False] * len(order.chunks)
        self._answer_far(TransferDone(order.job, found, time.perf_counter() - began))

    def _fetch(self, chunk: ChunkSlot) -> bool:
        assert self._far is not None, "asked for where there is one"
        return self._far.fetch((chunk.group, chunk.name), self._bytes(chunk))

    def _keep(self, chunk: ChunkSlot) -> bool:
        assert self._far is not None, "asked for where there is one"
        return self._far.keep((chunk.group, chunk.name), self._bytes(chunk))

    def _bytes(self, chunk: ChunkSlot) -> memoryview:
        return self._arena.bytes(chunk.slot, self._pages[chunk.group].chunk_bytes)

    def _answer_moved(self, done: TransferDone, elsewhere: float) -> None:
        """`done` has the processor time of the threads here; the tiers had taken so much `elsewhere` before."""
        assert self._far is not None
        done.taken = self._per_second * (done.taken + max(0.0, self._far.cpu_elsewhere - elsewhere))
        self._answer_far(done)

    def _answer_far(self, done: TransferDone) -> None:
        assert self._far is not None
        done.far = self._far.reports()
        self._answer(done)

    def _report(self, far: SecondaryTiers) -> None:
        last = None
        while not self._closed.wait(REPORT_SECONDS):
            if (now := far.reports()) != last:
                self._answer(TierStatus(now))
            last = now

    def _start_outside(self, works: Works, name: str, count: int, *, nice: bool = False) -> None:
        for number in range(count):
            self._start(lambda: _go_outside(works, nice=nice), f"{name}-{number}")

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # whatever it is, the next step ends its rank with these words
                logger.exception("the thread %s of the KV tiers ends", name)
                self._died = f"the thread {name} of the KV tiers ended: {type(error).__name__}: {error}"

        threading.Thread(target=run, name=name, daemon=True).start()


def _go_outside(works: Works, *, nice: bool) -> None:
    if nice:
        lower_priority()
    while True:
        works.get()()
