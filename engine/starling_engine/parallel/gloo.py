"""Exchange through gloo, over TCP: between CPUs of one machine or of many. Also the TCPStore where ranks meet."""

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
from starling_engine.parallel.communicator import PendingTensor, call_group
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

MAX_SENT = 4
"""Tensors that may be on their way to other ranks at once."""


@functools.cache
def _look_up_no_names() -> None:
    """Limits name lookups of this process to /etc/hosts: its ranks have addresses.

    TCPStore looks up the name of each client for its log, and waits for the network's resolver: five seconds for each answer that
    is lost. https://github.com/pytorch/pytorch/issues/159007
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # the GNU C library's
    if configure is not None:
        configure(b"hosts", b"files")


def serve_store(host: str, timeout: float) -> TCPStore:
    """Serves a store on a free port of `host`, as long as the object lives."""
    _look_up_no_names()
    return TCPStore(host, 0, is_master=True, timeout=datetime.timedelta(seconds=timeout), wait_for_workers=False)


def join_store(rendezvous: Rendezvous) -> TCPStore:
    """Connects to a store. Raises PeerLost when nobody serves it, or its process is stopped: TCPStore would wait for ever."""
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


def _join_store(rendezvous: Rendezvous, report: Callable[[TCPStore | DistError], None]) -> None:
    wait = datetime.timedelta(seconds=rendezvous.timeout)
    try:
        report(TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=wait))
    except DistError as error:
        report(error)


class GlooCommunicator:
    """A process group without torch's default group, so that several can exist side by side."""

    capturable = False

    def __init__(self, store: Store, name: str, shard: Shard, rendezvous: Rendezvous, tick: Callable[[], None]) -> None:
        """Blocks until all ranks are there. Raises PeerLost if one does not come.

        `name` must be unique within the store; `tick` as in `Communicator`.
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
        self._wait(call_group(self._group.allreduce, [x]))
        return x

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002 - whatever it is
        return torch.float32

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.shard.count, *x.shape), dtype=x.dtype)
        self._wait(call_group(self._group.allgather, [list(out)], [x.contiguous()]))
        return out

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        x, out = x.contiguous(), torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype)
        work = call_group(self._group.alltoall_base, out, x, list(received), list(sent))

        def arrived() -> torch.Tensor:
            self._wait(work)
            return out

        return arrived

    def send(self, x: torch.Tensor, to: int) -> None:
        while len(self._sent) >= MAX_SENT:
            self._wait(self._sent.popleft()[0])
        self._sent.append((call_group(self._group.send, [x], to, 0), x))

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        self._wait(call_group(self._group.recv, [x], source, 0))
        return x

    def _wait(self, work: Work) -> None:
        self.tick()
        call_group(work.wait)
