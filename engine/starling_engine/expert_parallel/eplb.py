"""EPLB: places experts by their load, so that all ranks have equally much to do (after DeepSeek's algorithm).

The most loaded experts get copies. Copies are packed into ranks, the heaviest first, each to the rank with the least load so far.
A placement that is in force changes only where that pays, and then moves few experts.
Many layers are placed at once: loops go over experts and copies, arrays over layers.
"""

import numpy as np

from starling_engine.errors import ConfigError
from starling_engine.expert_parallel.load import Floats, Holds, Ints, as_holds, as_layers, imbalance_of
from starling_engine.topology.placement import Layer, Placement

LAYERS_AT_ONCE = 1000
"""Larger arrays are new memory each time, which takes longer than the work."""

MIN_GAIN = 0.02
"""The imbalance that a layer must lose to be rearranged: that much less of the mean load on its busiest rank."""


def rebalance(
    load: Floats,
    ranks: int,
    slots: int,
    nodes: int = 1,
    groups: int = 1,
    previous: Placement | None = None,
    min_gain: float = MIN_GAIN,
) -> Placement:
    """load [layers, experts], of any unit -> a placement on `ranks` of `slots` experts each.

    `groups`: routing sends a token to a few groups of experts only. Where groups divide over the `nodes`, each node holds whole
    groups, so that a token goes to few nodes; `ranks` are counted node by node. A layer stays as in `previous`, of the same ranks,
    if it would gain less than `min_gain`; else few of its experts move. Raises ConfigError when there are too few slots.
    """
    experts = load.shape[1]
    if ranks * slots < experts or slots > experts:
        low, high = -(-experts // ranks), experts
        raise ConfigError(f"{ranks} ranks with {slots} slots each cannot share {experts} experts; possible: {low} to {high} slots")
    if ranks % nodes or groups % nodes or experts % groups or slots > experts // nodes:
        nodes = 1
    placed: list[Layer] = []
    for at in range(0, len(load), LAYERS_AT_ONCE):
        some = load[at : at + LAYERS_AT_ONCE]
        holds = _place(some, ranks, slots, nodes, groups)
        if previous is not None:
            before = as_holds(previous.layers[at : at + LAYERS_AT_ONCE], experts)
            holds = _with_few_moves(some, before, holds, nodes, min_gain)
        placed += as_layers(holds)
    return Placement(experts, tuple(placed))


# ---- a placement from nothing ----


def _place(load: Floats, ranks: int, slots: int, nodes: int, groups: int) -> Holds:
    layers, experts = load.shape
    # A layer without any load is placed like one whose experts have equal loads.
    load = np.where(load.sum(1, keepdims=True) > 0, load, 1.0)
    if nodes == 1:
        return _place_on_equal_ranks(load, ranks, slots)
    size = experts // groups
    group_load = load.reshape(layers, groups, size).sum(2)
    order = np.argsort(-group_load, axis=1, kind="stable")
    node_of = _pack(order, np.take_along_axis(group_load, order, 1), nodes, groups // nodes)
    # Row (layer, node) has the groups of that node.
    of_node = np.take_along_axis(order, np.argsort(node_of, axis=1, kind="stable"), 1).reshape(layers * nodes, -1)
    members = (of_node[:, :, None] * size + np.arange(size)).reshape(layers * nodes, -1)
    rows = np.repeat(np.arange(layers), nodes)[:, None]
    inside = _place_on_equal_ranks(load[rows, members], ranks // nodes, slots)
    holds = np.zeros((layers * nodes, ranks // nodes, experts), dtype=np.bool_)
    np.put_along_axis(holds, np.broadcast_to(members[:, None], inside.shape), inside, 2)
    return holds.reshape(layers, ranks, experts)


def _place_on_equal_ranks(load: Floats, ranks: int, slots: int) -> Holds:
    """Places experts on the ranks of one node, between which the distance does not matter."""
    layers, experts = load.shape
    copies = _copies(load, ranks * slots - experts, ranks)
    share = load / copies
    order = np.argsort(-share, axis=1, kind="stable")
    times = np.take_along_axis(copies, order, 1).ravel()
    items = np.repeat(order.ravel(), times).reshape(layers, -1)
    rank_of = _pack(items, np.take_along_axis(share, items, 1), ranks, slots)
    holds = np.zeros((layers, ranks, experts), dtype=np.bool_)
    layer, item = np.nonzero(rank_of >= 0)
    holds[layer, rank_of[layer, item], items[layer, item]] = True
    return holds


def _copies(load: Floats, spare: int, ranks: int) -> Ints:
    """Returns how many ranks are to hold each expert, [layers, experts]: `spare` copies more than there are experts.

    The next copy always goes to the expert whose copies have the most to do.
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
    """items [N, P] with their weights, heaviest first and equal items side by side -> the bin of each [N, P], `room` to a bin.

    Each goes to the lightest bin with room. An item goes to a bin once; one that finds only bins that have it is left out, as -1.
    """
    count, size = items.shape
    rows = np.arange(count)
    filled = np.zeros((count, bins))
    left = np.full((count, bins), room)
    bin_of = np.empty((count, size), dtype=np.int64)
    has = np.zeros((count, bins), dtype=np.bool_)
    for p in range(size):
        again = items[:, p] == items[:, p - 1] if p else np.zeros(count, dtype=np.bool_)
        has &= again[:, None]
        cost = np.where(has, np.inf, filled) if again.any() else filled
        best = cost.argmin(1)
        found = np.isfinite(cost[rows, best])
        bin_of[:, p] = np.where(found, best, -1)
        into, bin_ = (rows, best) if found.all() else (rows[found], best[found])
        left[into, bin_] -= 1
        filled[into, bin_] += weights[into, p]
        filled[into, bin_] = np.where(left[into, bin_] > 0, filled[into, bin_], np.inf)
        has[into, bin_] = True
    return bin_of


# ---- a change of the placement in force ----


def _with_few_moves(load: Floats, before: Holds, after: Holds, nodes: int, min_gain: float) -> Holds:
    """Chooses for each layer, cheapest first: `before`, `before` with some experts swapped, or `after`.

    A layer stays as `before` where `after` would gain less than `min_gain`. Swaps do where they gain nearly as much as `after`.
    Else `after` replaces it, its parts on the ranks that hold the most of each already.
    """
    assert before.shape == after.shape, "rebalanced among the same ranks"
    was, fresh = imbalance_of(load, before), imbalance_of(load, after)
    holds = before.copy()
    changing = np.flatnonzero(fresh < was - min_gain)
    if not len(changing):
        return before
    swapped = _swapped(load[changing], before[changing], nodes, min_gain)
    enough = imbalance_of(load[changing], swapped) <= np.minimum(fresh + min_gain, was - min_gain)[changing]
    holds[changing[enough]] = swapped[enough]
    replaced = changing[~enough]
    if len(replaced):
        holds[replaced] = _aligned(before[replaced], after[replaced], nodes)
    return holds


def _swapped(load: Floats, before: Holds, nodes: int, min_gain: float) -> Holds:
    """Exchanges experts of each node's busiest rank for lighter ones of its idlest, pair by pair."""
    layers, ranks, experts = before.shape
    holds = before.reshape(layers * nodes, ranks // nodes, experts).copy()
    share = np.repeat(load / before.sum(1), nodes, axis=0)
    active = np.arange(len(holds))
    for _ in range(ranks):
        of_ranks = np.matmul(holds[active], share[active, :, None])[:, :, 0]
        high, low, here = of_ranks.argmax(1), of_ranks.argmin(1), np.arange(len(active))
        gap = of_ranks[here, high] - of_ranks[here, low]
        give, take, gain = _best_pair(share[active], holds[active, high], holds[active, low], gap)
        going = (gain > 0) & (of_ranks[here, high] > (1 + min_gain / 2) * of_ranks.mean(1))
        active, high, low, give, take = active[going], high[going], low[going], give[going], take[going]
        if not len(active):
            break
        holds[active, high, give] = holds[active, low, take] = False
        holds[active, low, give] = holds[active, high, take] = True
    return holds.reshape(before.shape)


def _best_pair(share: Floats, high: Holds, low: Holds, gap: Floats) -> tuple[Ints, Ints, Floats]:
    """Chooses the experts that a busier and an idler rank should exchange, which differ by `gap` [N] in load.

    high and low are what the two hold, [N, experts]. Returns what the busier gives, what it takes, and the gain, [N] each: the load
    that leaves the busier one without making the other the busier.
    """
    most = int(max((high & ~low).sum(1).max(), (low & ~high).sum(1).max(), 1))
    none = np.nan
    mine, theirs = np.where(high & ~low, share, none), np.where(low & ~high, share, none)
    gives, takes = np.argsort(mine, axis=1)[:, :most], np.argsort(theirs, axis=1)[:, :most]
    moved = np.take_along_axis(mine, gives, 1)[:, :, None] - np.take_along_axis(theirs, takes, 1)[:, None]
    gain = np.nan_to_num(np.minimum(moved, gap[:, None, None] - moved), nan=-1.0).reshape(len(share), -1)
    best, rows = gain.argmax(1), np.arange(len(share))
    return gives[rows, best // most], takes[rows, best % most], gain[rows, best]


def _aligned(before: Holds, after: Holds, nodes: int) -> Holds:
    """Reorders the nodes of `after`, and the ranks of each node, so that most experts stay where they were `before`."""
    layers, ranks, experts = after.shape
    if nodes > 1:
        whole = (layers, nodes, ranks // nodes, experts)
        by_node = _matched(_union(before.reshape(whole)), _union(after.reshape(whole)))
        after = after.reshape(whole)[np.arange(layers)[:, None], by_node]
    before, after = (holds.reshape(layers * nodes, ranks // nodes, experts) for holds in (before, after))
    return after[np.arange(len(after))[:, None], _matched(before, after)].reshape(layers, ranks, experts)


def _matched(before: Holds, after: Holds) -> Ints:
    """[N, M]: which part of `after` [N, M, experts] replaces each part of `before`. The most alike pairs come first."""
    count, parts, _ = before.shape
    common = np.matmul(before.astype(np.float32), after.astype(np.float32).transpose(0, 2, 1))
    matched = np.empty((count, parts), dtype=np.int64)
    rows = np.arange(count)
    for _ in range(parts):
        old, new = np.divmod(common.reshape(count, -1).argmax(1), parts)
        matched[rows, old] = new
        common[rows, old] = -1
        common[rows, :, new] = -1
    return matched


def _union(ranks: Holds) -> Holds:
    """[layers, nodes, ranks, experts] -> [layers, nodes, experts]."""
    holds: Holds = np.logical_or.reduce(ranks, axis=2)
    return holds
