"""Ranks that talk through gloo, over TCP: on one machine or many, on CPUs."""

import ctypes
import datetime
import functools
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work
from torch.distributed import DistError

from starling_engine.errors import PeerLost
from starling_engine.parallel.communicator import Arriving, of_group
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

MAX_SENT = 4
"""Tensors that may be on their way to other ranks at once."""


@functools.cache
def _look_up_no_names() -> None:
    """For this process, whose ranks have addresses: names are those of /etc/hosts alone.

    TCPStore looks up the name of whoever connects, to say it in its log, and waits as long as the network's resolver does: five
    seconds for each answer that is lost. https://github.com/pytorch/pytorch/issues/159007
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # the GNU C library's
    if configure is not None:
        configure(b"hosts", b"files")


def serve_store(host: str, timeout: float) -> TCPStore:
    """The store itself, on a free port of `host`. It lives as long as the object."""
    _look_up_no_names()
    return TCPStore(host, 0, is_master=True, timeout=datetime.timedelta(seconds=timeout), wait_for_workers=False)


def join_store(rendezvous: Rendezvous) -> TCPStore:
    """Raises PeerLost when nobody serves it, or whoever does has stopped: then TCPStore itself would wait for ever."""
    _look_up_no_names()
    joined: SimpleQueue[TCPStore | DistError] = SimpleQueue()
    Thread(target=_join_store, args=(rendezvous, joined.put), name="rendezvous", daemon=True).start()
    place = f"no rendezvous at {rendezvous.host}:{rendezvous.port}"
    try:
        store = joined.get(timeout=rendezvous.timeout)
    except Empty:
        raise PeerLost(f"{place}: no answer within {rendezvous.timeout:g} s") from None
    if isinstance(store, DistError):
        raise PeerLost(f"{place}: {store}") from store
    return store


def _join_store(rendezvous: Rendezvous, tell: Callable[[TCPStore | DistError], None]) -> None:
    wait = datetime.timedelta(seconds=rendezvous.timeout)
    try:
        tell(TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=wait))
    except DistError as error:
        tell(error)


class GlooCommunicator:
    """One process group, made without any default group, so that one can be built beside another."""

    capturable = False

    def __init__(self, store: Store, name: str, shard: Shard, rendezvous: Rendezvous, tick: Callable[[], None]) -> None:
        """`name` must be the group's own within the store. Blocks until all ranks are there; raises PeerLost if one does not come.

        `tick` as in `Communicator`.
        """
        self.shard = shard
        self.tick = tick
        self._sent: deque[tuple[Work, torch.Tensor]] = deque()
        gloo: Any = ProcessGroupGloo  # its type stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=rendezvous.address)]
        options._timeout = datetime.timedelta(seconds=rendezvous.timeout)
        try:
            self._group = gloo(PrefixStore(name, store), shard.index, shard.count, options)
        except RuntimeError as error:
            raise PeerLost(f"the ranks of {name} did not all come: {error}") from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._wait(of_group(self._group.allreduce, [x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.shard.count, *x.shape), dtype=x.dtype)
        self._wait(of_group(self._group.allgather, [list(out)], [x.contiguous()]))
        return out

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        x, out = x.contiguous(), torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype)
        work = of_group(self._group.alltoall_base, out, x, list(received), list(sent))

        def arrived() -> torch.Tensor:
            self._wait(work)
            return out

        return arrived

    def send(self, x: torch.Tensor, to: int) -> None:
        while len(self._sent) >= MAX_SENT:
            self._wait(self._sent.popleft()[0])
        self._sent.append((of_group(self._group.send, [x], to, 0), x))

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        self._wait(of_group(self._group.recv, [x], source, 0))
        return x

    def _wait(self, work: Work) -> None:
        self.tick()
        of_group(work.wait)
