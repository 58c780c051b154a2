"""Searches a better placement of experts in a thread, while steps go on."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from starling_engine.expert_parallel.eplb import rebalance
from starling_engine.expert_parallel.load import Ints, as_holds, balancedness, rank_loads
from starling_engine.ipc.priority import lower_priority
from starling_engine.topology.placement import Placement

logger = logging.getLogger("starling.parallel")


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """A new placement; `before` is the `balancedness` that was counted, `after` what the same load should give."""

    placement: Placement
    before: float
    after: float


def find_placement(counts: Ints, placement: Placement, rows: Sequence[int], slots: int, nodes: int, groups: int) -> FoundPlacement:
    """Rebalances the layers `rows` of `placement`. counts [ranks, rows, experts]: the tokens that came to each rank's experts.

    `slots`, `nodes` and `groups` as in `rebalance`. Layers that would gain too little stay as they are.
    """
    load = counts.sum(0).astype(np.float64)
    here = Placement(placement.num_experts, tuple(placement.layers[row] for row in rows))
    there = rebalance(load, placement.ranks, slots, nodes, groups, previous=here)
    new = dict(zip(rows, there.layers, strict=True))
    layers = tuple(new.get(row, layer) for row, layer in enumerate(placement.layers))
    after = balancedness(rank_loads(load, as_holds(there.layers, placement.num_experts)))
    return FoundPlacement(Placement(placement.num_experts, layers), balancedness(counts.sum(2).T), after)


class PlacementSearch:
    """A thread that runs `find`. `found` stays None where that fails."""

    def __init__(self, find: Callable[[], FoundPlacement]) -> None:
        self.found: FoundPlacement | None = None
        self._find = find
        self._thread = threading.Thread(target=self._run, name="eplb", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        lower_priority()
        try:
            self.found = self._find()
        except Exception:
            logger.exception("experts could not be rebalanced; they stay where they are")
