"""The epoch that a core is in, and its way to the next one."""

from dataclasses import replace

from starling_engine.core.messages import EpochNotice, FrontendCall, Outbox
from starling_engine.delta import Delta
from starling_engine.executor.base import Executor
from starling_engine.scheduler.scheduler import Scheduler
from starling_engine.topology.epoch import (
    CHECKPOINT,
    PEERS,
    Abandon,
    Commit,
    EpochCommand,
    EpochPlan,
    EpochReply,
    Prepare,
    Prepared,
    Switched,
)
from starling_engine.topology.layout import EpochMembership


class CoreEpochs:
    """Passes commands of epochs on to the ranks. A core that does not step with others stays in its first epoch."""

    def __init__(
        self, membership: EpochMembership, scheduler: Scheduler, executor: Executor, outbox: Outbox, *, taking: bool
    ) -> None:
        self.membership = membership
        self.taking = taking
        """True while the core takes requests: not while it stands by for an epoch, or leaves one."""
        self._scheduler = scheduler
        self._executor = executor
        self._outbox = outbox
        self._next: EpochPlan | None = None
        self._leaving: Commit | None = None
        """Sent once no step is in flight: a rank that has left can run none."""
        self._caller: tuple[int, FrontendCall] | None = None
        """The epoch of the command that has not been answered yet, and its caller."""

    @property
    def busy(self) -> bool:
        """True while a command has not been answered."""
        return self._caller is not None

    def handle(self, command: EpochCommand, caller: FrontendCall) -> list[Delta]:
        """Begins to carry out a command. A core that is to leave hands its requests over first."""
        match command:
            case Prepare(epoch):
                self._next, self._caller = epoch, (epoch.number, caller)
            case Abandon():
                self._next = self._caller = None
            case Commit(number):
                self._caller = number, caller
                if self._next is not None and self._next.dp is None:
                    return self._leave(command)
        self._executor.send(command)
        return []

    def on_idle(self) -> None:
        """No step is in flight."""
        if self._leaving is not None:
            self._executor.send(self._leaving)
            self._leaving = None

    def on_reply(self, reply: EpochReply) -> None:
        match reply:
            case Prepared(loaded=loaded):
                stats = self._scheduler.stats
                stats.epoch_peer_bytes_total += loaded[PEERS].bytes if PEERS in loaded else 0
                stats.epoch_checkpoint_bytes_total += loaded[CHECKPOINT].bytes if CHECKPOINT in loaded else 0
            case Switched(number):
                self._switch(number)
        if self._caller is not None and self._caller[0] == reply.number:  # else of an epoch that was abandoned
            self._outbox.answer(self._caller[1], reply)
            self._caller = None

    def _leave(self, commit: Commit) -> list[Delta]:
        self.taking, self._leaving = False, commit
        self._outbox.notify(EpochNotice(self.membership, taking=False))  # before the requests, so that none is sent back here
        return self._scheduler.hand_over()

    def _switch(self, number: int) -> None:
        epoch_plan, self._next = self._next, None
        assert epoch_plan is not None and epoch_plan.number == number, "only an epoch that was prepared is switched to"
        self._scheduler.epoch = number
        self.taking = epoch_plan.dp is not None
        layout = replace(self.membership.layout, data=1)
        workers = tuple(core * layout.world_size + rank for core in epoch_plan.cores for rank in range(layout.world_size))
        self.membership = EpochMembership(number, replace(layout, data=epoch_plan.data), workers)
        self._outbox.notify(EpochNotice(self.membership, self.taking))
