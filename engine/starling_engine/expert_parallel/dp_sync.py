"""DP sync: ranks of several cores agree before each step whether all run it, since each holds experts that the others need."""

from enum import Enum, auto
from typing import NamedTuple

import torch

from starling_engine.expert_parallel.epoch import Epoch
from starling_engine.topology.epoch import EpochPlan


class SyncDecision(Enum):
    """Outcome of one sync, the same for all ranks of a core."""

    RUN = auto()
    """All ranks of this core have a plan: run it."""
    SERVE = auto()
    """Compute the experts that are here, for the other cores' tokens."""
    SWITCHED = auto()
    """Run no step: all ranks are in the next epoch now."""


class EplbVote(NamedTuple):
    """One rank's two numbers for EPLB, which all ranks see before each step; see `EplbManager`."""

    loaded_layers: int = 0
    """Layers that could change over; VETO where nothing may."""
    has_placement: int = 0
    """1 where the rank has a new placement to broadcast."""


VETO = -1
NO_VOTE = EplbVote()


class DpSync:
    """Keeps one rank in step with the others of its epoch.

    Before each step all ranks exchange a row: whether they have a plan, the epoch they are ready for, and their `EplbVote`. While
    any rank has a plan, all take the step, those without one to serve with their experts. When none had one, all sleep at the same
    step. A rank that gets a plan then wakes the others.
    """

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self.prepared: EpochPlan | None = None
        self._next: Epoch | None = None
        self._committed = 0
        self._step = 0
        self.votes = torch.empty(0, 2)
        """[ranks, 2]: each rank's `EplbVote` of the last sync."""
        self._awake = False

    @property
    def step(self) -> int:
        """Number of syncs in the epoch; the same on all its ranks."""
        return self._step

    def prepare(self, epoch_plan: EpochPlan, epoch: Epoch | None) -> None:
        """Sets the next epoch; None for a rank that leaves."""
        self.abandon()
        self.prepared, self._next = epoch_plan, epoch

    def abandon(self) -> None:
        """Drops the next epoch, if there is one."""
        if self._next is not None:
            self._next.close()
        self.prepared = self._next = None
        self._committed = 0

    def commit(self, number: int) -> bool:
        """Makes this rank ready to switch. Returns True when it has switched at once, since it was in no epoch."""
        assert self.prepared is not None and self.prepared.number == number, "only what was prepared can be committed"
        self._committed = number
        if self.epoch is None:
            self._switch()
            return True
        return False

    def needs_sync(self, *, has_plan: bool) -> bool:
        """Returns whether a step is due; False while all may sleep."""
        if self.epoch is None:
            return False
        if not self._awake and self.epoch.wakeup.called(self._step):
            self._awake = True
        return self._awake or has_plan or bool(self._committed)

    def sync(self, *, has_plan: bool, vote: EplbVote = NO_VOTE) -> SyncDecision:
        """Meets the other ranks. A `vote` keeps no rank awake. Raises RankLost when one does not come."""
        epoch = self.epoch
        assert epoch is not None, "without an epoch there are no ranks to meet"
        if not self._awake:
            epoch.wakeup.wake(self._step)
        rows = epoch.communicator.all_gather(torch.tensor([has_plan, self._committed, *vote]))
        self._step += 1
        if int(rows[:, 1].min()) > epoch.plan.number:
            self._switch()
            return SyncDecision.SWITCHED
        self.votes = rows[:, 2:]
        self._awake = bool(rows[:, :2].any())
        # A plan reaches the ranks of a core at different times: they run it when all of them have it.
        ready = rows[:, 0].view(epoch.plan.data, -1).all(1)
        return SyncDecision.RUN if ready[epoch.dp] else SyncDecision.SERVE

    def _switch(self) -> None:
        """Enters the next epoch. All ranks take its first step, so that none has to be woken for it."""
        old, self.epoch = self.epoch, self._next
        self._next, self._committed = None, 0
        self._step, self._awake = 0, True
        if old is not None:
            old.close()
