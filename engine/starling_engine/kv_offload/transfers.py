"""Threads of a rank that move chunks beside the steps: between pages and slots, and between slots and the secondary tiers."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from starling_engine.config import WorkerConfig
from starling_engine.errors import RankLost
from starling_engine.ipc.priority import lower_priority
from starling_engine.kv.spec import KVGroup, StateGroup
from starling_engine.kv_offload.arena import Arena, CopyStream, GroupPages, copy_chunk, group_pages
from starling_engine.kv_offload.orders import ChunkSlot, TierStatus, TransferDone, TransferKind, TransferOrder
from starling_engine.kv_offload.secondary.base import Chunk
from starling_engine.kv_offload.secondary.tiers import SecondaryTiers, open_secondary
from starling_engine.kv_offload.sizes import chunk_bytes, host_slots
from starling_engine.model_config.config import ModelConfig

logger = logging.getLogger("starling.worker")

THREADS: Mapping[TransferKind, int] = {"store": 1, "load": 1, "look_up": 2, "promote": 4, "write_back": 4}
"""Threads of each kind of order, apart from each other: a write may take 15 s, and requests wait for lookups and reads."""
HOLDS_UP = 2
"""Share of a processor that steps lose when another thread takes it, at most: all processors wait for the last one.

With two processors, all the time was lost for which one of them was taken (measured).
"""
HUNG_SECONDS = 60.0
"""A copy between pages and a slot takes milliseconds; a thread that needs longer than this hangs."""

WorkQueue = queue.SimpleQueue[Callable[[], None]]


class ChunkwiseJob:
    """Chunks of one order, each done by any free thread; the last one answers, with the processor time of all as `taken`."""

    def __init__(self, order: TransferOrder, work: Callable[[ChunkSlot], bool], answer: Callable[[TransferDone], None]) -> None:
        self._chunks = order.chunks
        self._work = work
        self._answer = answer
        self._outcome = TransferDone(order.job, [False] * len(order.chunks))
        self._left = len(order.chunks)
        self._lock = threading.Lock()

    def do(self, at: int) -> None:
        """Does the chunk number `at`."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            done = self._work(self._chunks[at])
        except Exception:
            logger.exception("a chunk could not be transferred")
            done = False
        with self._lock:
            self._outcome.done[at] = done
            self._outcome.seconds += time.perf_counter() - began
            self._outcome.taken += time.thread_time() - cpu_began
            self._left -= 1
            last = not self._left
        if last:
            self._answer(self._outcome)


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
        *,
        processors: int = 0,
    ) -> None:
        self._pages = list(pages)
        self._arena = arena
        self._secondary = secondary or SecondaryTiers([], [])
        self._answer = answer
        self._per_second = min(1.0, HOLDS_UP / processors) if processors else 0.0
        """Seconds that steps lose by a second of a processor's time."""
        device = next((group.runs.device for group in pages), torch.device("cpu"))
        self._streams: dict[TransferKind, CopyStream] = {"store": CopyStream(device), "load": CopyStream(device)}
        self._copying: dict[TransferKind, float] = {}
        """Time at which the current copy of each of the two threads began."""
        self._step = -1
        self._stepped = threading.Condition()
        self._closed = threading.Event()
        self._died: str | None = None
        """The thread that ended, and its error."""
        self._queues: dict[TransferKind, WorkQueue] = {kind: queue.SimpleQueue() for kind in THREADS}
        for kind in THREADS if secondary is not None else self._streams:
            self._start_threads(kind)
        if secondary is not None:
            self._start(self._report, "kv-report")

    def order(self, order: TransferOrder) -> None:
        put = self._queues[order.kind].put
        match order.kind:
            case "store" | "load":
                put(lambda: self._copy(order))
            case "look_up":
                put(lambda: self._look_up(order))
            case "promote":
                self._put_each(order, self._secondary.read)
            case "write_back":
                self._put_each(order, self._secondary.write)

    def finished(self, step_id: int) -> None:
        """Step `step_id` has run; later ones may have begun.

        Raises RankLost where a thread has died, or hangs in a copy: its orders never end, and their blocks and slots would stay
        taken. They cannot be given to others, as the copy may still write.
        """
        if self._died is not None:
            raise RankLost(self._died)
        now = time.monotonic()
        for kind, began in tuple(self._copying.items()):
            if now - began > HUNG_SECONDS:
                raise RankLost(f"the thread kv-{kind} of the KV tiers has copied one chunk for more than {HUNG_SECONDS:g} s")
        with self._stepped:
            self._step = step_id
            self._stepped.notify_all()

    def close(self) -> None:
        self._closed.set()
        self._secondary.close()

    def _copy(self, order: TransferOrder) -> None:
        """Copies chunks between pages and slots, once the step has run that the order names."""
        with self._stepped:
            self._stepped.wait_for(lambda: self._step >= order.after)
        began, done, kind = time.perf_counter(), True, order.kind
        try:
            with self._streams[kind]:
                for each in order.chunks:
                    self._copying[kind] = time.monotonic()
                    slot = self._arena.slot(each.slot)
                    copy_chunk(self._pages[each.group], each.blocks, each.first, slot, to_pages=kind == "load")
        except Exception:
            logger.exception("chunks could not be copied")
            done = False
        self._copying.pop(kind, None)
        self._answer(TransferDone(order.job, [done] * len(order.chunks), time.perf_counter() - began))

    def _look_up(self, order: TransferOrder) -> None:
        began = time.perf_counter()
        try:
            found = self._secondary.lookup([(chunk.group, chunk.name) for chunk in order.chunks])
        except Exception:
            logger.exception("chunks could not be looked up")
            found = [False] * len(order.chunks)
        self._answer(TransferDone(order.job, found, time.perf_counter() - began, self._secondary.reports()))

    def _put_each(self, order: TransferOrder, move: Callable[[Chunk, memoryview], bool]) -> None:
        """Has each chunk moved between its slot and the secondary tiers."""
        before = self._secondary.cpu_elsewhere

        def work(chunk: ChunkSlot) -> bool:
            return move((chunk.group, chunk.name), self._arena.bytes(chunk.slot, self._pages[chunk.group].chunk_bytes))

        job = ChunkwiseJob(order, work, lambda done: self._answer_transfer(done, before))
        for at in range(len(order.chunks)):
            self._queues[order.kind].put(partial(job.do, at))

    def _answer_transfer(self, done: TransferDone, elsewhere: float) -> None:
        """Answers with the processor time of the threads here, and what the tiers' own processes took since `elsewhere`."""
        done.taken = self._per_second * (done.taken + max(0.0, self._secondary.cpu_elsewhere - elsewhere))
        done.secondary = self._secondary.reports()
        self._answer(done)

    def _report(self, every: float = 1.0) -> None:
        """Tells the secondary tiers' counters when they have changed; looks at them `every` so many seconds."""
        last = None
        while not self._closed.wait(every):
            if (now := self._secondary.reports()) != last:
                self._answer(TierStatus(now))
            last = now

    def _start_threads(self, kind: TransferKind) -> None:
        def work() -> None:
            if kind in ("store", "write_back"):
                lower_priority()
            while True:
                self._queues[kind].get()()

        for _ in range(THREADS[kind]):
            self._start(work, f"kv-{kind}")

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # the next step ends its rank with this message
                logger.exception("the thread %s of the KV tiers ends", name)
                self._died = f"the thread {name} of the KV tiers ended: {type(error).__name__}: {error}"

        threading.Thread(target=run, name=name, daemon=True).start()


def open_tiers(
    config: WorkerConfig,
    model: ModelConfig,
    groups: Sequence[KVGroup],
    slabs: torch.Tensor,
    answer: Callable[[TransferDone | TierStatus], None],
    state: StateGroup | None = None,
) -> TransferThreads | None:
    """Makes a rank's tiers from its configuration; None where it has none.

    `slabs` are those of the pool on this rank. Raises ConfigError.
    """
    if config.tiers is None:
        return None
    on_device = slabs.device.type != "cpu"
    arena = Arena(host_slots(model, config), chunk_bytes(model, config), pinned=on_device)
    secondary = open_secondary(config.tiers, model, config)
    processors = 0 if on_device else config.num_threads
    return TransferThreads(group_pages(groups, slabs, state), arena, secondary, answer, processors=processors)
