"""The load of experts: the tokens that each was sent, and how evenly a placement shares them out over the ranks.

Placements of many layers are arrays here, see `Holds`: loops would take too long.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.topology.placement import Layer, Placement

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
Holds = npt.NDArray[np.bool_]
"""[layers, ranks, experts]: true where the rank holds the expert."""

WINDOW_PARTS = 8
"""Parts of a window, which slides by one part at a time."""


class LoadWindow:
    """Counts each expert's tokens over the last `steps` steps, or up to an eighth less."""

    def __init__(self, layers: int, experts: int, steps: int) -> None:
        self._length = max(1, steps // WINDOW_PARTS)
        self._parts = torch.zeros(WINDOW_PARTS, layers, experts, dtype=torch.int64)
        self._step = 0

    def add(self, layer: int, ids: torch.Tensor) -> None:
        """ids [T, top_k] of one layer's tokens, -1 for none."""
        experts = self._parts.shape[2]
        counts = torch.bincount(ids.flatten() + 1, minlength=experts + 1)
        self._parts[self._step // self._length % WINDOW_PARTS, layer] += counts[1:].cpu()

    def loads(self) -> torch.Tensor:
        """Returns the counts, [layers, experts] int64."""
        return self._parts.sum(0)

    def clear(self) -> None:
        self._parts.zero_()

    def next_step(self) -> None:
        self._step += 1
        if self._step % self._length == 0:
            self._parts[self._step // self._length % WINDOW_PARTS] = 0


def imbalance(load: Floats, placement: Placement) -> Floats:
    """load [layers, experts] -> [layers]: the busiest rank's load by the mean; 1 is best. Copies of an expert share its load."""
    return imbalance_of(load, as_holds(placement.layers, placement.num_experts))


def imbalance_of(load: Floats, holds: Holds) -> Floats:
    """Does the same as `imbalance`, for a placement as an array."""
    of_ranks = rank_loads(load, holds)
    mean = of_ranks.mean(1)
    ratios: Floats = np.divide(of_ranks.max(1), mean, out=np.ones_like(mean), where=mean > 0)
    return ratios


def rank_loads(load: Floats, holds: Holds) -> Floats:
    """load [layers, experts] -> each rank's part of it [layers, ranks]."""
    of_ranks: Floats = np.einsum("le,lre->lr", load / holds.sum(1), holds)
    return of_ranks


def balancedness(of_ranks: Floats | Ints) -> float:
    """Divides the ranks' mean load by the busiest one's, each summed over the layers; 1 is best. of_ranks [layers, ranks].

    vLLM has the same figure. Layers wait for their busiest rank one after another: a balancedness of 0.5 takes twice the time.
    """
    busiest = float(of_ranks.max(1).sum())
    return float(of_ranks.mean(1).sum()) / busiest if busiest else 1.0


def as_holds(layers: Sequence[Layer], num_experts: int) -> Holds:
    parts = [experts for layer in layers for experts in layer]
    rows = np.repeat(np.arange(len(parts)), [len(experts) for experts in parts])
    holds = np.zeros((len(parts), num_experts), dtype=np.bool_)
    holds[rows, np.fromiter(chain.from_iterable(parts), dtype=np.int64)] = True
    return holds.reshape(len(layers), -1, num_experts)


def as_layers(holds: Holds) -> Iterator[Layer]:
    layers, ranks, num_experts = holds.shape
    rows, experts = np.divmod(np.flatnonzero(holds), num_experts)
    ends = np.bincount(rows, minlength=layers * ranks).cumsum().tolist()
    held = experts.tolist()
    parts = [tuple(held[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return (tuple(parts[at : at + ranks]) for at in range(0, layers * ranks, ranks))
