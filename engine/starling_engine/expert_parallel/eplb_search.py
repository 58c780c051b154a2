"""Looks for a better placement of experts beside what serves."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from starling_engine.expert_parallel.eplb import rebalance
from starling_engine.expert_parallel.expert_load import Ints, as_holds, evenness, rank_loads
from starling_engine.platforms.priority import lower_priority
from starling_engine.topology.placement import Placement

logger = logging.getLogger("starling.parallel")


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """`before` is how even the ranks' work was, as they counted it, `after` how even the same load would be (see `evenness`)."""

    placement: Placement
    before: float
    after: float


def find(counts: Ints, placement: Placement, rows: Sequence[int], slots: int, nodes: int, groups: int) -> FoundPlacement:
    """counts [ranks, rows, experts] of tokens that each rank's experts were given -> `placement` with these rows rebalanced.

    `slots`, `nodes` and `groups` as in `rebalance`. Rows that would gain too little stay as they are.
    """
    load = counts.sum(0).astype(np.float64)
    here = Placement(placement.num_experts, tuple(placement.layers[row] for row in rows))
    there = rebalance(load, placement.ranks, slots, nodes, groups, previous=here)
    new = dict(zip(rows, there.layers, strict=True))
    layers = tuple(new.get(row, layer) for row, layer in enumerate(placement.layers))
    after = evenness(rank_loads(load, as_holds(there.layers, placement.num_experts)))
    return FoundPlacement(Placement(placement.num_experts, layers), evenness(counts.sum(2).T), after)


class PlacementSearch:
    """A thread that finds; `found` stays None where that fails."""

    def __init__(self, look: Callable[[], FoundPlacement]) -> None:
        self.found: FoundPlacement | None = None
        self._look = look
        self._thread = threading.Thread(target=self._run, name="eplb", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        lower_priority()
        try:
            self.found = self._look()
        except Exception:
            logger.exception("experts could not be rebalanced; they stay where they are")
