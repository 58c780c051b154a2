"""An epoch as one rank has it: its connections to the ranks that hold a stage's experts among them."""

from collections.abc import Callable

import torch
import zmq
from torch._C._distributed_c10d import Store

from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.gloo import GlooCommunicator, join_store
from starling_engine.parallel.nccl import join_nccl
from starling_engine.parallel.ranks import with_shared_memory
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.layout import Coordinates, ParallelLayout
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

CPU = torch.device("cpu")


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
        plan: EpochPlan,
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
        assert plan.dp is not None, "a core that leaves has no rank"
        self.plan = plan
        self.dp = plan.dp
        name, shard = plan.exchange(layout, coordinates)
        store = join_store(plan.rendezvous)
        gloo = GlooCommunicator(store, name, shard, plan.rendezvous, tick)
        host = with_shared_memory(gloo, plan.rendezvous, lambda ep: plan.rank_name(ep, layout, coordinates.pp))
        self._nccl = join_nccl(host, store, name, plan.rendezvous, device) if device.type == "cuda" and shard.count > 1 else None
        self.communicator: Communicator = self._nccl or host
        self.wakeup = WakeupSockets(context, store, name, shard, plan.rendezvous)
        store.set(f"{name}/experts/{shard.index}", server_address)
        self.server_addresses = [store.get(f"{name}/experts/{ep}").decode() for ep in range(shard.count)]
        """Addresses of all ranks' ExpertServers."""

    def close(self) -> None:
        self.wakeup.close()
        if self._nccl is not None:
            self._nccl.close()
