"""Where the ranks of a next epoch wait for each other to load: as long as it takes, while any of them gets on."""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from starling_engine.errors import EpochFailed, RankLost
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.layout import Coordinates, ParallelLayout

LOOK_SECONDS = 0.02

LoadedSoFar = Callable[[], tuple[int, bool]]
"""How many experts this rank has loaded for the epoch, and whether those are all. Raises what loading raised."""


def meet(
    store: Store, plan: EpochPlan, layout: ParallelLayout, place: Coordinates, loaded: LoadedSoFar, cancelled: Callable[[], bool]
) -> None:
    """Returns once all ranks of the stage have loaded, so that none waits long for another in what comes next.

    Raises EpochFailed when it is cancelled, and RankLost, naming who is missing, when none gets on for the rendezvous' timeout.
    """
    name, shard = plan.exchange(layout, place)
    told, here = 0, False
    seen, since = (-1, -1), time.monotonic()
    while not cancelled():
        count, complete = loaded()
        if complete and not here:
            here = True
            store.set(f"{name}/here/{shard.index}", "")
            store.add(f"{name}/here", 1)
        state = store.add(f"{name}/loaded", count - told), store.add(f"{name}/here", 0)
        told = count
        if state[1] == shard.count:
            return
        if state != seen:
            seen, since = state, time.monotonic()
        elif time.monotonic() - since > plan.rendezvous.timeout:
            late = [plan.call(ep, layout, place.pp) for ep in range(shard.count) if not store.check([f"{name}/here/{ep}"])]
            raise RankLost(f"{' and '.join(late)} did not get ready, and nothing was loaded for {plan.rendezvous.timeout:g} s")
        time.sleep(LOOK_SECONDS)
    raise EpochFailed("cancelled")
