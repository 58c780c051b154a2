"""Sleep of a core: one command after another, each once nothing runs any more."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from starling_engine.core.messages import FrontendCall, Outbox
from starling_engine.delta import Delta
from starling_engine.executor.base import Executor
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.sleep import (
    TAGS,
    MemoryReply,
    ReleaseMemory,
    RestoreMemory,
    Sleep,
    SleepCommand,
    SleepState,
    Slept,
    Tag,
    WakeUp,
)


@dataclass(frozen=True, slots=True)
class SleepRequest:
    """`caller` gets the answer; None for a command that the core gives itself."""

    command: SleepCommand
    caller: FrontendCall | None


class CoreSleeper:
    """Stepped with its core, in the same thread. `uses_device` is True while steps or transfers use the device's memory."""

    def __init__(self, scheduler: Scheduler, executor: Executor, outbox: Outbox, uses_device: Callable[[], bool]) -> None:
        self.announced = SleepState()
        """The state that all frontends know."""
        self._scheduler = scheduler
        self._executor = executor
        self._outbox = outbox
        self._uses_device = uses_device
        self._asleep: frozenset[Tag] = frozenset()
        self._level = 0
        self._requests: deque[SleepRequest] = deque()
        self._ordered = False
        """True when the ranks have the order of the first of these."""
        self._answers: list[tuple[FrontendCall, Slept]] = []

    @property
    def state(self) -> SleepState:
        """Neither a core that sleeps nor one that is about to takes requests."""
        falling = any(isinstance(request.command, Sleep) for request in self._requests)
        asleep = tuple(tag for tag in TAGS if tag in self._asleep)
        return SleepState(asleep, taking=not (asleep or falling), level=self._level if asleep else 0)

    @property
    def busy(self) -> bool:
        """True while a command has not been carried out."""
        return bool(self._requests)

    def handle(self, command: SleepCommand, caller: FrontendCall) -> list[Delta]:
        """Queues a command; returns the last deltas of requests that end for it. Refuses Sleep at once where requests forbid it."""
        ended: list[Delta] = []
        if isinstance(command, Sleep):
            running = len(self._scheduler.requests)
            if command.mode == "refuse" and running:
                text = f"{running} requests have not ended; mode=wait lets them finish first, and mode=abort ends them"
                self._answers.append((caller, Slept(refused=text)))
                return []
            if command.mode == "abort":
                ended = self._scheduler.end_all("abort")
        self._requests.append(SleepRequest(command, caller))
        return ended

    def step(self) -> None:
        """Orders what can begin now, and answers. All frontends know the new state before a caller has its answer."""
        if self._requests and not self._ordered:
            self._order(self._requests[0].command)
        if self.state != self.announced:
            self.announced = self.state
            self._outbox.notify(self.announced)
        for caller, answer in self._answers:
            self._outbox.answer(caller, answer)
        self._answers.clear()

    def on_reply(self, done: MemoryReply) -> None:
        """Ends the command that the ranks have carried out, or could not."""
        request = self._requests.popleft()
        self._ordered = False
        if isinstance(request.command, WakeUp):
            if done.error is None:
                self._asleep -= set(request.command.tags)
        else:
            before, self._asleep = self._asleep, frozenset(TAGS)
            # Weights that sleep sleep no lighter for it; those that were awake are as the command says.
            self._level = max(request.command.level, self._level) if "weights" in before else request.command.level
            if done.error is not None:  # some ranks may have done it
                undo = WakeUp([tag for tag in TAGS if tag not in before])
                self._requests.appendleft(SleepRequest(undo, None))
        if request.caller is not None:
            self._answers.append((request.caller, Slept(error=done.error)))

    def _order(self, command: SleepCommand) -> None:
        if isinstance(command, WakeUp):
            self._executor.send(RestoreMemory(command.tags))
        elif self._uses_device():  # chunks are first stored where there is a tier for them
            return
        else:
            self._scheduler.reset_device_cache()
            self._executor.send(ReleaseMemory(command.level))
        self._ordered = True
