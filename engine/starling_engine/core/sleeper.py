"""When a core sleeps and wakes: one order after another, each once nothing runs any more."""

from collections import deque
from dataclasses import dataclass

from starling_engine.core.engine_core import EngineCore
from starling_engine.delta import Delta
from starling_engine.sleep import (
    TAGS,
    MemoryOrderDone,
    ReleaseMemory,
    RestoreMemory,
    Sleep,
    SleepOrder,
    SleepState,
    Slept,
    Tag,
    WakeUp,
)


@dataclass(frozen=True, slots=True)
class SleepRequest:
    """`by` is the frontend that gets the answer; None for what the core asks of itself."""

    order: SleepOrder
    by: bytes | None


class CoreSleeper:
    """Stepped with its core, in the same thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._asleep: frozenset[Tag] = frozenset()
        self._level = 0
        self._asked: deque[SleepRequest] = deque()
        self._under_way = False
        """Whether the workers have been told of the first of these."""
        self._answers: list[tuple[bytes, Slept]] = []

    @property
    def state(self) -> SleepState:
        """Neither a core that sleeps nor one that is about to takes requests."""
        falling = any(isinstance(asked.order, Sleep) for asked in self._asked)
        asleep = tuple(tag for tag in TAGS if tag in self._asleep)
        return SleepState(asleep, taking=not (asleep or falling), level=self._level if asleep else 0)

    @property
    def busy(self) -> bool:
        """Whether something is to be done, or an answer to come."""
        return bool(self._asked)

    def take(self, order: SleepOrder, by: bytes) -> list[Delta]:
        """The last words on requests that end for it. A Sleep that requests stand against is refused at once."""
        ended: list[Delta] = []
        if isinstance(order, Sleep):
            running = len(self._core.scheduler.requests)
            if order.mode == "refuse" and running:
                text = f"{running} requests have not ended; mode=wait lets them finish first, and mode=abort ends them"
                self._answers.append((by, Slept(order.number, refused=text)))
                return []
            if order.mode == "abort":
                ended = self._core.scheduler.end_all("abort")
        self._asked.append(SleepRequest(order, by))
        return ended

    def step(self) -> list[tuple[bytes, Slept]]:
        """Goes on as far as it can now; the answers that there are, and to whom."""
        if self._under_way:
            rested = self._core.executor.rested()
            if rested is not None:
                self._under_way = False
                self._end(self._asked.popleft(), rested)
        if self._asked and not self._under_way:
            self._begin(self._asked[0].order)
        answers, self._answers = self._answers, []
        return answers

    def _begin(self, order: SleepOrder) -> None:
        if isinstance(order, WakeUp):
            self._core.executor.rest(RestoreMemory(order.tags))
        elif self._core.uses_device:  # what was computed is first saved where there is a tier for it
            return
        else:
            self._core.scheduler.forget_device()
            self._core.executor.rest(ReleaseMemory(order.level))
        self._under_way = True

    def _end(self, asked: SleepRequest, rested: MemoryOrderDone) -> None:
        if isinstance(asked.order, WakeUp):
            if rested.error is None:
                self._asleep -= set(asked.order.tags)
        else:
            before, self._asleep = self._asleep, frozenset(TAGS)
            # Weights that sleep sleep no lighter for it; those that were awake are as the order says.
            self._level = max(asked.order.level, self._level) if "weights" in before else asked.order.level
            if rested.error is not None:  # some ranks may have done it
                undo = WakeUp(0, [tag for tag in TAGS if tag not in before])
                self._asked.appendleft(SleepRequest(undo, None))
        if asked.by is not None:
            self._answers.append((asked.by, Slept(asked.order.number, error=rested.error)))
