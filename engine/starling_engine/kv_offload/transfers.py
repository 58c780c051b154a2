"""Threads of a rank that move chunks beside the steps: between pages and slots, and between slots and the secondary tiers."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from starling_engine.config import WorkerConfig
from starling_engine.errors import RankLost
from starling_engine.kv.spec import KVGroup
from starling_engine.kv_offload.arena import Arena
from starling_engine.kv_offload.copies import CopyStream, GroupPages, group_pages, load_chunk, store_chunk
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
from starling_engine.kv_offload.secondary.tiers import SecondaryTiers, open_secondary
from starling_engine.kv_offload.sizes import chunk_bytes, host_slots
from starling_engine.model_config.config import ModelConfig
from starling_engine.platforms.priority import lower_priority

logger = logging.getLogger("starling.worker")

LOOKUP_THREADS, READ_THREADS, WRITE_THREADS = 2, 4, 4
"""Apart from each other: a write may take 15 s, and requests wait for lookups and reads."""
HOLDS_UP = 2
"""Share of a processor that steps lose when another thread takes it, at most: all processors wait for the last one.

With two processors, all the time was lost for which one of them was taken (measured).
"""

COPY_HUNG_SECONDS = 60.0
"""A copy between pages and a slot takes milliseconds; a thread that needs longer than this hangs."""

REPORT_SECONDS = 1.0
"""Time between two checks whether the secondary tiers' counters have changed."""

CopyOrder = TypeVar("CopyOrder", StoreChunks, LoadChunks)
WorkQueue = queue.SimpleQueue[Callable[[], None]]


class ChunkwiseJob:
    """Chunks of one order, each done by any free thread; the last one answers."""

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
    """Carries out orders and answers each; all methods may be called from any thread.

    Stores and loads each have a thread, which on a GPU has a stream of its own. They are done in the order in which they came.
    `processors` are the host's with which steps compute; 0 where they compute on a device of their own.
    """

    def __init__(
        self,
        pages: Sequence[GroupPages],
        arena: Arena,
        secondary: SecondaryTiers | None,
        answer: Callable[[TransferDone | TierStatus], None],
        first_step: int = 0,
        *,
        processors: int = 0,
    ) -> None:
        self._pages = list(pages)
        self._device = next((layer.device for group in pages for layer in group.layers), torch.device("cpu"))
        self._arena = arena
        self._secondary = secondary
        self._answer = answer
        self._per_second = min(1.0, HOLDS_UP / processors) if processors else 0.0
        """Seconds that steps lose by a second of a processor's time."""
        self._stores: queue.SimpleQueue[StoreChunks] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[LoadChunks] = queue.SimpleQueue()
        self._lookups: WorkQueue = queue.SimpleQueue()
        self._reads: WorkQueue = queue.SimpleQueue()
        self._writes: WorkQueue = queue.SimpleQueue()
        self._step = first_step - 1
        self._stepped = threading.Condition()
        self._closed = threading.Event()
        self._died: str | None = None
        """The thread that ended, and its error."""
        self._copying: dict[str, float] = {}
        """Time at which each thread's current copy began, by its name."""
        self._start(self._store, "kv-store")
        self._start(self._load, "kv-load")
        if secondary is not None:
            self._start(lambda: self._report(secondary), "kv-report")
            self._start_threads(self._lookups, "kv-lookup", LOOKUP_THREADS)
            self._start_threads(self._reads, "kv-read", READ_THREADS)
            self._start_threads(self._writes, "kv-write", WRITE_THREADS, low_priority=True)

    def order(self, order: Order) -> None:
        match order:
            case StoreChunks():
                self._stores.put(order)
            case LoadChunks():
                self._loads.put(order)
            case LookUpChunks():
                self._lookups.put(lambda: self._look_up(order))
            case PromoteChunks():
                self._put_each(self._reads, order, self._promote)
            case WriteBackChunks():
                self._put_each(self._writes, order, self._write_back)

    def finished(self, step_id: int) -> None:
        """Step `step_id` has run; later ones may have begun.

        Raises RankLost where a thread has died, or hangs in a copy: its orders never end, and their blocks and slots would stay
        taken. They cannot be given to others, as the copy may still write.
        """
        if self._died is not None:
            raise RankLost(self._died)
        now = time.monotonic()
        for name, began in tuple(self._copying.items()):
            if now - began > COPY_HUNG_SECONDS:
                raise RankLost(f"the thread {name} of the KV tiers has copied one chunk for more than {COPY_HUNG_SECONDS:g} s")
        with self._stepped:
            self._step = step_id
            self._stepped.notify_all()

    def close(self) -> None:
        self._closed.set()
        if self._secondary is not None:
            self._secondary.close()

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

    def _in_time(self, order: CopyOrder) -> CopyOrder:
        """Waits until the step has run after which the order is to be carried out; returns the order."""
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
                for each in order.copies:
                    self._copying[name] = time.monotonic()
                    copy(self._pages[each.group], each.blocks, each.first, self._arena.slot(each.slot))
        except Exception:
            logger.exception("chunks could not be copied")
            done = False
        self._copying.pop(name, None)
        self._answer(TransferDone(order.job, [done] * len(order.copies), time.perf_counter() - began))

    # ---- between slots and the secondary tiers ----

    def _put_each(self, queue: WorkQueue, order: PromoteChunks | WriteBackChunks, work: Callable[[ChunkSlot], bool]) -> None:
        assert self._secondary is not None, "ordered only where there are secondary tiers"
        before = self._secondary.cpu_elsewhere
        job = ChunkwiseJob(order, lambda done: self._answer_transfer(done, before))
        for at, chunk in enumerate(order.chunks):
            queue.put(lambda at=at, chunk=chunk: self._do(job, at, chunk, work))  # type: ignore[misc]

    def _do(self, job: ChunkwiseJob, at: int, chunk: ChunkSlot, work: Callable[[ChunkSlot], bool]) -> None:
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            done = work(chunk)
        except Exception:
            logger.exception("a chunk could not be transferred")
            done = False
        job.finish(at, done, time.perf_counter() - began, time.thread_time() - cpu_began)

    def _look_up(self, order: LookUpChunks) -> None:
        assert self._secondary is not None, "ordered only where there are secondary tiers"
        began = time.perf_counter()
        try:
            found = self._secondary.lookup([(chunk.group, chunk.name) for chunk in order.chunks])
        except Exception:
            logger.exception("chunks could not be looked up")
            found = [False] * len(order.chunks)
        self._answer_with_counters(TransferDone(order.job, found, time.perf_counter() - began))

    def _promote(self, chunk: ChunkSlot) -> bool:
        assert self._secondary is not None, "ordered only where there are secondary tiers"
        return self._secondary.read((chunk.group, chunk.name), self._bytes(chunk))

    def _write_back(self, chunk: ChunkSlot) -> bool:
        assert self._secondary is not None, "ordered only where there are secondary tiers"
        return self._secondary.write((chunk.group, chunk.name), self._bytes(chunk))

    def _bytes(self, chunk: ChunkSlot) -> memoryview:
        return self._arena.bytes(chunk.slot, self._pages[chunk.group].chunk_bytes)

    def _answer_transfer(self, done: TransferDone, elsewhere: float) -> None:
        """Answers with the processor time of the threads here, and what the tiers' own processes took since `elsewhere`."""
        assert self._secondary is not None
        done.taken = self._per_second * (done.taken + max(0.0, self._secondary.cpu_elsewhere - elsewhere))
        self._answer_with_counters(done)

    def _answer_with_counters(self, done: TransferDone) -> None:
        assert self._secondary is not None
        done.secondary = self._secondary.reports()
        self._answer(done)

    def _report(self, secondary: SecondaryTiers) -> None:
        last = None
        while not self._closed.wait(REPORT_SECONDS):
            if (now := secondary.reports()) != last:
                self._answer(TierStatus(now))
            last = now

    def _start_threads(self, queue: WorkQueue, name: str, count: int, *, low_priority: bool = False) -> None:
        for number in range(count):
            self._start(lambda: _work(queue, low_priority=low_priority), f"{name}-{number}")

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # the next step ends its rank with this message
                logger.exception("the thread %s of the KV tiers ends", name)
                self._died = f"the thread {name} of the KV tiers ended: {type(error).__name__}: {error}"

        threading.Thread(target=run, name=name, daemon=True).start()


def _work(queue: WorkQueue, *, low_priority: bool) -> None:
    if low_priority:
        lower_priority()
    while True:
        queue.get()()


def open_tiers(
    config: WorkerConfig,
    model: ModelConfig,
    groups: Sequence[KVGroup],
    kv: Sequence[torch.Tensor],
    answer: Callable[[TransferDone | TierStatus], None],
) -> TransferThreads | None:
    """Makes a rank's tiers from its configuration; None where it has none.

    `kv` has the pages of the layers that this rank holds. Raises ConfigError.
    """
    if config.tiers is None:
        return None
    on_device = bool(kv) and kv[0].device.type != "cpu"
    arena = Arena(host_slots(model, config), chunk_bytes(model, config), pinned=on_device)
    secondary = open_secondary(config.tiers, model, config)
    processors = 0 if on_device else config.num_threads
    return TransferThreads(group_pages(groups, kv), arena, secondary, answer, processors=processors)
