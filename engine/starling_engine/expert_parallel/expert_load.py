"""How much each rank has to do, by the load of the experts that it holds; and placements as arrays, for many layers at once."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from starling_engine.topology.placement import Layer, Placement

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
Holds = npt.NDArray[np.bool_]
"""[layers, ranks, experts]: whether the rank holds the expert."""


def imbalance(load: Floats, placement: Placement) -> Floats:
    """load [layers, experts] -> [layers]: the busiest rank's load by the mean; 1 is best. Copies of an expert share its load."""
    return imbalance_of(load, as_holds(placement.layers, placement.num_experts))


def imbalance_of(load: Floats, holds: Holds) -> Floats:
    """As `imbalance`."""
    of_ranks = rank_loads(load, holds)
    mean = of_ranks.mean(1)
    ratios: Floats = np.divide(of_ranks.max(1), mean, out=np.ones_like(mean), where=mean > 0)
    return ratios


def rank_loads(load: Floats, holds: Holds) -> Floats:
    """load [layers, experts] -> what each rank has of it [layers, ranks]."""
    of_ranks: Floats = np.einsum("le,lre->lr", load / holds.sum(1), holds)
    return of_ranks


def evenness(of_ranks: Floats | Ints) -> float:
    """of_ranks [layers, ranks] -> the ranks' mean by the busiest, each summed over the layers; 1 is best (vLLM's balancedness).

    Layers wait for their busiest rank one after another, so what is over 1 / this is time in which ranks have nothing to do.
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
