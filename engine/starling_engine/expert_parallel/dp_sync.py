"""Steps that the ranks of several cores take together, because each holds experts that the others' tokens need."""

from collections.abc import Callable
from enum import Enum, auto

import torch
import zmq

from starling_engine.expert_parallel.wakeup_sockets import WakeupSockets
from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.gloo import GlooCommunicator, join_store
from starling_engine.parallel.nccl import join_nccl
from starling_engine.parallel.ranks import nearby
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.layout import Coordinates, ParallelLayout

CPU = torch.device("cpu")


class Epoch:
    """One rank's place in an epoch: the ranks that hold a stage's experts among them, and the means to wake them."""

    def __init__(
        self,
        plan: EpochPlan,
        layout: ParallelLayout,
        place: Coordinates,
        context: zmq.Context[zmq.Socket[bytes]],
        tick: Callable[[], None],
        address: str,
        device: torch.device = CPU,
    ) -> None:
        """Blocks until all its ranks are there. Raises RankLost when one does not come. `address`: of this one's ExpertServer."""
        assert plan.dp is not None, "whoever leaves has no place"
        self.plan = plan
        self.dp = plan.dp
        name, shard = plan.exchange(layout, place)
        store = join_store(plan.rendezvous)
        gloo = GlooCommunicator(store, name, shard, plan.rendezvous, tick)
        host = nearby(gloo, plan.rendezvous, lambda ep: plan.call(ep, layout, place.pp))
        self._devices = join_nccl(host, store, name, plan.rendezvous, device) if device.type == "cuda" and shard.count > 1 else None
        self.ranks: Communicator = self._devices or host
        self.bells = WakeupSockets(context, store, name, shard, plan.rendezvous)
        store.set(f"{name}/experts/{shard.index}", address)
        self.addresses = [store.get(f"{name}/experts/{ep}").decode() for ep in range(shard.count)]
        """Of all ranks' ExpertServers."""

    def close(self) -> None:
        self.bells.close()
        if self._devices is not None:
            self._devices.close()


class SyncDecision(Enum):
    """What comes of meeting the others."""

    RUN = auto()
    """This rank and all others of its core have a plan: run it."""
    SERVE = auto()
    """Serve the others with the experts that are here."""
    SWITCHED = auto()
    """No step: all are in the next epoch now."""


class DpSync:
    """This rank's steps among the others'.

    Before each step all tell each other whether they have a plan. While anybody has one, all take the step, those without one to
    serve with their experts. When nobody had one, all sleep at the same step, and who gets a plan then rings for the others.
    """

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self.prepared: EpochPlan | None = None
        self._next: Epoch | None = None
        self._committed = 0
        self._step = 0
        self.said = torch.empty(0, 2)
        """[ranks, 2]: what each said at the last turn."""
        self._awake = False

    @property
    def step(self) -> int:
        """How many turns the epoch has had; the same on all its ranks."""
        return self._step

    def offer(self, plan: EpochPlan, epoch: Epoch | None) -> None:
        """What is to come next; no epoch for a rank that leaves."""
        self.withdraw()
        self.prepared, self._next = plan, epoch

    def withdraw(self) -> None:
        if self._next is not None:
            self._next.close()
        self.prepared = self._next = None
        self._committed = 0

    def commit(self, number: int) -> bool:
        """From now on this rank is ready to switch; True when it has done so at once, for it is in no epoch yet."""
        assert self.prepared is not None and self.prepared.number == number, "only what was prepared can be committed"
        self._committed = number
        if self.epoch is None:
            self._switch()
            return True
        return False

    def wants_turn(self, *, has_plan: bool) -> bool:
        if self.epoch is None:
            return False
        if not self._awake and self.epoch.bells.heard(self._step):
            self._awake = True
        return self._awake or has_plan or bool(self._committed)

    def turn(self, *, has_plan: bool, says: tuple[int, int] = (0, 0)) -> SyncDecision:
        """Meets the others. `says` is for them to hear, and keeps nobody awake. Raises RankLost when one does not come."""
        epoch = self.epoch
        assert epoch is not None, "in no epoch there is nobody to meet"
        if not self._awake:
            epoch.bells.ring(self._step)
        rows = epoch.ranks.all_gather(torch.tensor([has_plan, self._committed, *says]))
        self._step += 1
        if int(rows[:, 1].min()) > epoch.plan.number:
            self._switch()
            return SyncDecision.SWITCHED
        self.said = rows[:, 2:]
        self._awake = bool(rows[:, :2].any())
        # Messages reach the ranks of a core at different times; they run a plan together or not at all.
        ready = rows[:, 0].view(epoch.plan.data, -1).all(1)
        return SyncDecision.RUN if ready[epoch.dp] else SyncDecision.SERVE

    def _switch(self) -> None:
        """The first step of an epoch is taken by all, so that nobody has to be rung for."""
        old, self.epoch = self.epoch, self._next
        self._next, self._committed = None, 0
        self._step, self._awake = 0, True
        if old is not None:
            old.close()
