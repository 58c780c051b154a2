"""An epoch as one rank has it: connections to the ranks that share a stage's experts. The next one is prepared in a thread."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue

import msgspec
import torch
import zmq
from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from starling_engine.config import WorkerConfig
from starling_engine.errors import EpochFailed, PeerLost, RankLost
from starling_engine.expert_parallel.peers import ExpertPublisher
from starling_engine.ipc.priority import lower_priority
from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.gloo import GlooCommunicator, join_store
from starling_engine.parallel.nccl import join_nccl
from starling_engine.parallel.ranks import with_shared_memory
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.layout import Coordinates, ParallelLayout
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

CPU = torch.device("cpu")
POLL_SECONDS = 0.02


class WakeupSockets:
    """Wakes ranks that sleep: one socket to listen on, and one to each other rank. Used by one thread at a time."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], store: Store, name: str, shard: Shard, rendezvous: Rendezvous
    ) -> None:
        """The ranks find each other in the store, under `name`. Waits for all of them."""
        self.socket = context.socket(zmq.PULL)
        has_ipv6 = ":" in rendezvous.address
        self.socket.setsockopt(zmq.IPV6, has_ipv6)
        host = f"[{rendezvous.address}]" if has_ipv6 else rendezvous.address
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        store.set(f"{name}/wakeup/{shard.index}", f"tcp://{host}:{port}")
        self._others: list[zmq.Socket[bytes]] = []
        for other in range(shard.count):
            if other != shard.index:
                socket = context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.IPV6, has_ipv6)
                socket.connect(store.get(f"{name}/wakeup/{other}").decode())
                self._others.append(socket)

    def wake(self, step: int) -> None:
        """Calls all other ranks to step `step`."""
        for socket in self._others:
            socket.send(str(step).encode())

    def called(self, step: int) -> bool:
        """Returns whether a rank waits at `step`. Forgets calls to earlier steps."""
        called = False
        while self.socket.poll(0):
            called |= int(self.socket.recv()) >= step
        return called

    def close(self) -> None:
        self.socket.close(0)
        for socket in self._others:
            socket.close()


class Epoch:
    """One rank's part in an epoch: a communicator with the ranks that share a stage's experts, and sockets to wake them."""

    def __init__(
        self,
        epoch_plan: EpochPlan,
        layout: ParallelLayout,
        coordinates: Coordinates,
        context: zmq.Context[zmq.Socket[bytes]],
        tick: Callable[[], None],
        server_address: str,
        device: torch.device = CPU,
    ) -> None:
        """Blocks until all its ranks are there. Raises RankLost when one does not come.

        `server_address` is that of this rank's ExpertServer; `tick` as in `Communicator`.
        """
        assert epoch_plan.dp is not None, "a core that leaves has no rank"
        self.plan = epoch_plan
        self.dp = epoch_plan.dp
        name, shard = epoch_plan.exchange(layout, coordinates)
        store = join_store(epoch_plan.rendezvous)
        gloo = GlooCommunicator(store, name, shard, epoch_plan.rendezvous, tick)
        host = with_shared_memory(gloo, epoch_plan.rendezvous, lambda ep: epoch_plan.rank_name(ep, layout, coordinates.pp))
        self._nccl = (
            join_nccl(host, store, name, epoch_plan.rendezvous, device) if device.type == "cuda" and shard.count > 1 else None
        )
        self.communicator: Communicator = self._nccl or host
        self.wakeup = WakeupSockets(context, store, name, shard, epoch_plan.rendezvous)
        store.set(f"{name}/experts/{shard.index}", server_address)
        self.server_addresses = [store.get(f"{name}/experts/{ep}").decode() for ep in range(shard.count)]
        """Addresses of all ranks' ExpertServers."""

    def close(self) -> None:
        self.wakeup.close()
        if self._nccl is not None:
            self._nccl.close()


# ---- the next epoch ----


LoadProgress = Callable[[], tuple[int, bool]]
"""Returns the experts that this rank has loaded for the epoch, and whether those are all. Raises what loading raised."""


class EpochJoiner:
    """Joins epochs for one rank, and first publishes which experts it holds: others load them. `tick` as in `Communicator`."""

    def __init__(self, config: WorkerConfig, publisher: ExpertPublisher, tick: Callable[[], None], device: torch.device) -> None:
        assert config.rendezvous is not None, "the executor says where this rank can be reached"
        self._layout, self._coordinates = config.layout, config.layout.coordinates(config.rank)
        self._address = config.rendezvous.address
        self._publisher = publisher
        self._tick = tick
        self._device = device

    def rank_in(self, epoch_plan: EpochPlan) -> int:
        """Returns this rank's number among those of the epoch that share the experts of its stage."""
        return epoch_plan.exchange(self._layout, self._coordinates)[1].index

    def join(self, epoch_plan: EpochPlan, progress: LoadProgress, cancelled: Callable[[], bool]) -> Epoch | None:
        """Meets the other ranks when all have loaded; returns None where this core leaves. Raises as `wait_for_loads`."""
        if epoch_plan.dp is None:
            with suppress(RankLost):  # ranks that need the experts here miss the rendezvous, too, and know for whom they wait
                self._publisher.publish(epoch_plan)
            return None
        self._publisher.publish(epoch_plan)
        epoch_plan = msgspec.structs.replace(epoch_plan, rendezvous=replace(epoch_plan.rendezvous, address=self._address))
        try:
            wait_for_loads(join_store(epoch_plan.rendezvous), epoch_plan, self._layout, self._coordinates, progress, cancelled)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
            at, server = self._coordinates, self._publisher.address
            return Epoch(epoch_plan, self._layout, at, context, self._tick, server, self._device)
        except DistError as error:
            raise PeerLost(f"the rank that serves the rendezvous is gone: {error}") from error


def wait_for_loads(
    store: Store,
    epoch_plan: EpochPlan,
    layout: ParallelLayout,
    coordinates: Coordinates,
    progress: LoadProgress,
    cancelled: Callable[[], bool],
) -> None:
    """Returns once all ranks of the stage have loaded, so that none waits long for another when they join the epoch.

    Raises EpochFailed when it is cancelled. Raises RankLost, naming the ranks that are missing, when no rank has loaded an expert
    for the rendezvous' timeout.
    """
    name, shard = epoch_plan.exchange(layout, coordinates)
    reported, here = 0, False
    seen, since = (-1, -1), time.monotonic()
    while not cancelled():
        count, complete = progress()
        if complete and not here:
            here = True
            store.set(f"{name}/here/{shard.index}", "")
            store.add(f"{name}/here", 1)
        state = store.add(f"{name}/loaded", count - reported), store.add(f"{name}/here", 0)
        reported = count
        if state[1] == shard.count:
            return
        if state != seen:
            seen, since = state, time.monotonic()
        elif time.monotonic() - since > epoch_plan.rendezvous.timeout:
            late = [
                epoch_plan.rank_name(ep, layout, coordinates.pp)
                for ep in range(shard.count)
                if not store.check([f"{name}/here/{ep}"])
            ]
            raise RankLost(
                f"{' and '.join(late)} did not get ready, and nothing was loaded for {epoch_plan.rendezvous.timeout:g} s"
            )
        time.sleep(POLL_SECONDS)
    raise EpochFailed("cancelled")


@dataclass(slots=True)
class EpochPreparation:
    """A preparation and its result. `epoch` is None for a rank that leaves, or where `error` says why there is none."""

    plan: EpochPlan
    cancelled: bool = False
    epoch: Epoch | None = None
    seconds: float = 0.0
    error: str | None = None


class EpochPreparer:
    """Runs each preparation in a thread. `socket` is readable when a result is there for `poll`."""

    ADDRESS = "inproc://prepared"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], joiner: EpochJoiner, progress: LoadProgress) -> None:
        self._context = context
        self._joiner = joiner
        self._progress = progress
        self._current: EpochPreparation | None = None
        self._done: SimpleQueue[EpochPreparation] = SimpleQueue()
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(self.ADDRESS)

    def start(self, epoch_plan: EpochPlan) -> None:
        """Replaces a preparation that is under way."""
        self.cancel()
        self._current = EpochPreparation(epoch_plan)
        threading.Thread(target=self._run, args=(self._current,), name=f"epoch-{epoch_plan.number}", daemon=True).start()

    def cancel(self) -> None:
        if self._current is not None:
            self._current.cancelled = True
            self._current = None

    def poll(self) -> EpochPreparation | None:
        """Returns the preparation that has ended, unless it was cancelled or replaced."""
        result = None
        while self.socket.poll(0):
            self.socket.recv()
            done = self._done.get()
            if done is self._current:
                result, self._current = done, None
            elif done.epoch is not None:
                done.epoch.close()
        return result

    def _run(self, preparation: EpochPreparation) -> None:
        lower_priority()
        began = time.monotonic()
        try:
            preparation.epoch = self._joiner.join(preparation.plan, self._progress, lambda: preparation.cancelled)
        except Exception as error:  # noqa: BLE001 - whatever it is, the epoch that serves goes on
            preparation.error = f"{type(error).__name__}: {error}"
        preparation.seconds = time.monotonic() - began
        self._done.put(preparation)
        wakeup = self._context.socket(zmq.PUSH)
        wakeup.connect(self.ADDRESS)
        wakeup.send(b"")
        wakeup.close()
