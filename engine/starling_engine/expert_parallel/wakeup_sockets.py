"""Doorbells: how a rank that has something to do wakes those that sleep."""

import zmq
from torch._C._distributed_c10d import Store

from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard


class WakeupSockets:
    """One socket to listen on, and one to each of the others. Used by one thread at a time."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], store: Store, name: str, shard: Shard, rendezvous: Rendezvous
    ) -> None:
        """The ranks find each other in the store, under `name`; waits for all of them."""
        self.socket = context.socket(zmq.PULL)
        has_ipv6 = ":" in rendezvous.address
        self.socket.setsockopt(zmq.IPV6, has_ipv6)
        host = f"[{rendezvous.address}]" if has_ipv6 else rendezvous.address
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        store.set(f"{name}/bell/{shard.index}", f"tcp://{host}:{port}")
        self._others: list[zmq.Socket[bytes]] = []
        for other in range(shard.count):
            if other != shard.index:
                socket = context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.IPV6, has_ipv6)
                socket.connect(store.get(f"{name}/bell/{other}").decode())
                self._others.append(socket)

    def ring(self, step: int) -> None:
        """Asks all others to come to step `step`."""
        for socket in self._others:
            socket.send(str(step).encode())

    def heard(self, step: int) -> bool:
        """Whether anybody waits at `step`. What was rung for earlier steps is over."""
        rung = False
        while self.socket.poll(0):
            rung |= int(self.socket.recv()) >= step
        return rung

    def close(self) -> None:
        self.socket.close(0)
        for socket in self._others:
            socket.close()
