"""Ranks as threads of one process: the kernels and gloo let others run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import TypeVar

import pytest
from starling_engine import native
from starling_engine.parallel.communicator import ALONE, Communicator, no_tick
from starling_engine.parallel.gloo import GlooCommunicator, join_store, serve_store
from starling_engine.parallel.shared_memory import SharedMemoryCommunicator
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard

T = TypeVar("T")
KINDS = [
    "gloo",
    pytest.param("shared", marks=pytest.mark.skipif(native.load() is None, reason="no native kernels")),
]

Join = Callable[[str, int, int], Communicator]
"""(name of the group, this rank in it, its ranks) -> their communicator."""


JOIN_SECONDS = 20.0
"""Seconds to find the store, on a machine that does other things too."""


def on_threads(count: int, kind: str, work: Callable[[int, Join], T], timeout: float = 20.0) -> list[T]:
    """Returns the result of `work` for each rank. Raises the first error of any. `timeout` is that of the groups they join."""
    store = serve_store("127.0.0.1", JOIN_SECONDS)
    unhurried = Rendezvous("127.0.0.1", store.port, "127.0.0.1", JOIN_SECONDS)
    barrier = Barrier(count, timeout=JOIN_SECONDS)

    def rank(index: int) -> T:
        mine = join_store(unhurried)
        barrier.wait()

        def join(name: str, at: int, of: int) -> Communicator:
            if of == 1:
                return ALONE
            if kind == "shared":
                return SharedMemoryCommunicator(GlooCommunicator(mine, name, Shard(at, of), unhurried, no_tick), timeout)
            return GlooCommunicator(mine, name, Shard(at, of), replace(unhurried, timeout=timeout), no_tick)

        return work(index, join)

    with ThreadPoolExecutor(count) as threads:
        return [future.result() for future in [threads.submit(rank, index) for index in range(count)]]


def on_ranks(count: int, kind: str, work: Callable[[Communicator], T], timeout: float = 20.0) -> list[T]:
    """Runs ranks that are one group, like `on_threads`.

    They have all met when `work` begins: one that is done early leaves no other to look for it. Nor does its group end then: what
    another has yet to read of it would be lost.
    """
    met, joined = Barrier(count, timeout=JOIN_SECONDS), list[Communicator]()

    def rank(index: int, join: Join) -> T:
        ranks = join("all", index, count)
        joined.append(ranks)
        met.wait()
        return work(ranks)

    return on_threads(count, kind, rank, timeout)
