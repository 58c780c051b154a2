"""Ranks of a next epoch wait for each other as long as any of them loads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from starling_engine.errors import EpochFailed, RankLost, WeightError
from starling_engine.expert_parallel.epoch import LoadProgress, wait_for_loads
from starling_engine.parallel.gloo import join_store, serve_store
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.layout import Coordinates, ParallelLayout
from starling_engine.topology.placement import Placement
from starling_engine.topology.rendezvous import Rendezvous

HOST = "127.0.0.1"
PATIENCE = 3.0
STORE_TIMEOUT = 20.0
"""Seconds to find the store, on a machine that does other things too."""
ALL = 6


def at_once() -> tuple[int, bool]:
    return ALL, True


def never() -> tuple[int, bool]:
    return 1, False


def slowly(every: float) -> LoadProgress:
    """One expert after another."""
    began = time.monotonic()

    def loaded() -> tuple[int, bool]:
        count = min(ALL, int((time.monotonic() - began) / every))
        return count, count == ALL

    return loaded


def wait_with(*ranks: LoadProgress, cancelled: Callable[[], bool] = lambda: False) -> list[BaseException | None]:
    """Returns the exception that each rank got, or None. Each rank is a core."""
    store = serve_store(HOST, STORE_TIMEOUT)
    barrier = threading.Barrier(len(ranks), timeout=STORE_TIMEOUT)
    cores = tuple(range(len(ranks)))

    def plan(dp: int) -> EpochPlan:
        rendezvous = Rendezvous(HOST, store.port, HOST, PATIENCE)
        return EpochPlan(number=1, cores=cores, dp=dp, placement=Placement(1, ()), rendezvous=rendezvous)

    def run(dp: int) -> None:
        mine = join_store(replace(plan(dp).rendezvous, timeout=STORE_TIMEOUT))
        barrier.wait()
        wait_for_loads(mine, plan(dp), ParallelLayout(), Coordinates(0, 0, 0), ranks[dp], cancelled)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.exception(60.0) for future in [pool.submit(run, dp) for dp in cores]]


def test_ranks_wait_longer_for_one_that_loads_than_for_one_that_does_not_come() -> None:
    assert wait_with(at_once, slowly(every=PATIENCE / 4)) == [None, None]


def test_a_rank_that_loads_nothing_is_named_by_the_others() -> None:
    for error in wait_with(at_once, never, at_once):
        assert isinstance(error, RankLost)
        assert str(error) == "rank 0 of engine core 1 did not get ready, and nothing was loaded for 3 s"


def test_an_error_of_loading_and_a_cancel_end_the_wait() -> None:
    unwanted = threading.Event()

    def fails() -> tuple[int, bool]:
        unwanted.set()
        raise WeightError("layer 3 is missing")

    waits, failed = wait_with(at_once, fails, cancelled=unwanted.is_set)
    assert isinstance(waits, EpochFailed)
    assert isinstance(failed, WeightError | EpochFailed)
