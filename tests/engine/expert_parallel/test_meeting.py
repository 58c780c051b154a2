"""Ranks of a next epoch wait for each other as long as any of them loads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from starling_engine.errors import EpochFailed, RankLost, WeightError
from starling_engine.expert_parallel.meeting import LoadedSoFar, meet
from starling_engine.parallel.gloo import join_store, serve_store
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.layout import Coordinates, ParallelLayout
from starling_engine.topology.placement import Placement
from starling_engine.topology.rendezvous import Rendezvous

HOST = "127.0.0.1"
PATIENCE = 3.0
TOGETHER = 20.0
"""Seconds to find the store, on a machine that does other things too."""
ALL = 6


def at_once() -> tuple[int, bool]:
    return ALL, True


def never() -> tuple[int, bool]:
    return 1, False


def slowly(every: float) -> LoadedSoFar:
    """One expert after another."""
    began = time.monotonic()

    def loaded() -> tuple[int, bool]:
        count = min(ALL, int((time.monotonic() - began) / every))
        return count, count == ALL

    return loaded


def meet_with(*ranks: LoadedSoFar, cancelled: Callable[[], bool] = lambda: False) -> list[BaseException | None]:
    """What comes of it for each rank, of one core each."""
    store = serve_store(HOST, TOGETHER)
    together = threading.Barrier(len(ranks), timeout=TOGETHER)
    members = tuple(range(len(ranks)))

    def plan(dp: int) -> EpochPlan:
        rendezvous = Rendezvous(HOST, store.port, HOST, PATIENCE)
        return EpochPlan(number=1, members=members, dp=dp, placement=Placement(1, ()), rendezvous=rendezvous)

    def run(dp: int) -> None:
        mine = join_store(replace(plan(dp).rendezvous, timeout=TOGETHER))
        together.wait()
        meet(mine, plan(dp), ParallelLayout(), Coordinates(0, 0, 0), ranks[dp], cancelled)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.exception(60.0) for future in [pool.submit(run, dp) for dp in members]]


def test_they_wait_for_one_that_loads_for_longer_than_they_wait_for_one_that_does_not_come() -> None:
    assert meet_with(at_once, slowly(every=PATIENCE / 4)) == [None, None]


def test_one_that_does_not_get_on_is_named_by_the_others() -> None:
    for error in meet_with(at_once, never, at_once):
        assert isinstance(error, RankLost)
        assert str(error) == "rank 0 of engine core 1 did not get ready, and nothing was loaded for 3 s"


def test_what_loading_raises_ends_it_and_who_is_not_wanted_any_more_stops_waiting() -> None:
    unwanted = threading.Event()

    def fails() -> tuple[int, bool]:
        unwanted.set()
        raise WeightError("layer 3 is missing")

    waits, failed = meet_with(at_once, fails, cancelled=unwanted.is_set)
    assert isinstance(waits, EpochFailed)
    assert isinstance(failed, WeightError | EpochFailed)
