"""Places experts by their load, so that all ranks have equally much to do (after DeepSeek's EPLB).

The most loaded experts get copies, and copies are packed into ranks, the heaviest first, each to the rank with the least so far.
Many layers are placed at once: loops go over experts and copies, arrays over layers.
"""

import numpy as np

from starling_engine.errors import ConfigError
from starling_engine.expert_parallel.eplb_change import improved
from starling_engine.expert_parallel.expert_load import Floats, Holds, Ints, as_holds, as_layers
from starling_engine.topology.placement import Layer, Placement

AT_ONCE = 1000
"""Layers: what is made for more of them is new memory each time, which takes longer than the work."""

WORTH = 0.02
"""What a layer must gain to be rearranged: so much less of the mean load on its busiest rank."""


def rebalance(
    load: Floats, ranks: int, slots: int, nodes: int = 1, groups: int = 1, previous: Placement | None = None, worth: float = WORTH
) -> Placement:
    """load [layers, experts], of any unit -> a placement on `ranks` of `slots` experts each.

    Where `groups` of experts that a token's choice is limited to divide over the `nodes`, each node holds whole groups, so that a
    token goes to few nodes; `ranks` are counted node by node. A layer stays as in `previous`, of the same ranks, if it would not
    gain `worth`; else it changes as little as it can (see `improved`). Raises ConfigError when there are too few slots.
    """
    experts = load.shape[1]
    if ranks * slots < experts or slots > experts:
        low, high = -(-experts // ranks), experts
        raise ConfigError(f"{ranks} ranks with {slots} slots each cannot share {experts} experts; possible: {low} to {high} slots")
    if ranks % nodes or groups % nodes or experts % groups or slots > experts // nodes:
        nodes = 1
    placed: list[Layer] = []
    for at in range(0, len(load), AT_ONCE):
        some = load[at : at + AT_ONCE]
        holds = _place(some, ranks, slots, nodes, groups)
        if previous is not None:
            holds = improved(some, as_holds(previous.layers[at : at + AT_ONCE], experts), holds, nodes, worth)
        placed += as_layers(holds)
    return Placement(experts, tuple(placed))


def _place(load: Floats, ranks: int, slots: int, nodes: int, groups: int) -> Holds:
    layers, experts = load.shape
    # A layer without any load is placed as one whose experts are equal.
    load = np.where(load.sum(1, keepdims=True) > 0, load, 1.0)
    if nodes == 1:
        return _place_alike(load, ranks, slots)
    size = experts // groups
    group_load = load.reshape(layers, groups, size).sum(2)
    order = np.argsort(-group_load, axis=1, kind="stable")
    at = _pack(order, np.take_along_axis(group_load, order, 1), nodes, groups // nodes)
    # Row (layer, node) has the groups of that node.
    of_node = np.take_along_axis(order, np.argsort(at, axis=1, kind="stable"), 1).reshape(layers * nodes, -1)
    members = (of_node[:, :, None] * size + np.arange(size)).reshape(layers * nodes, -1)
    rows = np.repeat(np.arange(layers), nodes)[:, None]
    inside = _place_alike(load[rows, members], ranks // nodes, slots)
    holds = np.zeros((layers * nodes, ranks // nodes, experts), dtype=np.bool_)
    np.put_along_axis(holds, np.broadcast_to(members[:, None], inside.shape), inside, 2)
    return holds.reshape(layers, ranks, experts)


def _place_alike(load: Floats, ranks: int, slots: int) -> Holds:
    """Over ranks that are all as near to each other."""
    layers, experts = load.shape
    copies = _copies(load, ranks * slots - experts, ranks)
    share = load / copies
    order = np.argsort(-share, axis=1, kind="stable")
    times = np.take_along_axis(copies, order, 1).ravel()
    items = np.repeat(order.ravel(), times).reshape(layers, -1)
    at = _pack(items, np.take_along_axis(share, items, 1), ranks, slots)
    holds = np.zeros((layers, ranks, experts), dtype=np.bool_)
    layer, item = np.nonzero(at >= 0)
    holds[layer, at[layer, item], items[layer, item]] = True
    return holds


def _copies(load: Floats, spare: int, ranks: int) -> Ints:
    """[layers, experts]: how many ranks are to hold each, `spare` of them besides the first: in turn one more of the expert whose
    copies have the most to do.
    """
    copies = np.ones(load.shape, dtype=np.int64)
    share = load.astype(np.float64)
    rows = np.arange(len(load))
    for _ in range(spare):
        most = share.argmax(1)
        copies[rows, most] += 1
        now = copies[rows, most]
        share[rows, most] = np.where(now < ranks, load[rows, most] / now, -1.0)
    return copies


def _pack(items: Ints, weights: Floats, bins: int, room: int) -> Ints:
    """items [N, P] with their weights, heaviest first and equal items together -> the bin of each [N, P], `room` to a bin.

    Each goes to the lightest bin with room. An item goes to a bin once; one that finds only bins that have it is left out, as -1.
    """
    count, size = items.shape
    rows = np.arange(count)
    filled = np.zeros((count, bins))
    left = np.full((count, bins), room)
    at = np.empty((count, size), dtype=np.int64)
    has = np.zeros((count, bins), dtype=np.bool_)
    for p in range(size):
        again = items[:, p] == items[:, p - 1] if p else np.zeros(count, dtype=np.bool_)
        has &= again[:, None]
        cost = np.where(has, np.inf, filled) if again.any() else filled
        best = cost.argmin(1)
        found = np.isfinite(cost[rows, best])
        at[:, p] = np.where(found, best, -1)
        into, bin_ = (rows, best) if found.all() else (rows[found], best[found])
        left[into, bin_] -= 1
        filled[into, bin_] += weights[into, p]
        filled[into, bin_] = np.where(left[into, bin_] > 0, filled[into, bin_], np.inf)
        has[into, bin_] = True
    return at
