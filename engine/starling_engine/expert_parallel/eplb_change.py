"""How the placement in force becomes one that suits the load better, without moving more experts than that takes."""

import numpy as np

from starling_engine.expert_parallel.expert_load import Floats, Holds, Ints, imbalance_of


def improved(load: Floats, before: Holds, after: Holds, nodes: int, worth: float) -> Holds:
    """Of each layer `before` where `after` would gain less than `worth`; that with a few experts swapped where this gains nearly as
    much; else `after`, its parts on the ranks that hold the most of each.
    """
    assert before.shape == after.shape, "rebalanced among the same ranks"
    was, fresh = imbalance_of(load, before), imbalance_of(load, after)
    holds = before.copy()
    wanting = np.flatnonzero(fresh < was - worth)
    if not len(wanting):
        return before
    swapped = _swapped(load[wanting], before[wanting], nodes, worth)
    enough = imbalance_of(load[wanting], swapped) <= np.minimum(fresh + worth, was - worth)[wanting]
    holds[wanting[enough]] = swapped[enough]
    anew = wanting[~enough]
    if len(anew):
        holds[anew] = _alike(before[anew], after[anew], nodes)
    return holds


def _swapped(load: Floats, before: Holds, nodes: int, worth: float) -> Holds:
    """`before` with experts of each node's busiest rank exchanged for lighter ones of its idlest, pair by pair."""
    layers, ranks, experts = before.shape
    holds = before.reshape(layers * nodes, ranks // nodes, experts).copy()
    share = np.repeat(load / before.sum(1), nodes, axis=0)
    active = np.arange(len(holds))
    for _ in range(ranks):
        of_ranks = np.matmul(holds[active], share[active, :, None])[:, :, 0]
        high, low, here = of_ranks.argmax(1), of_ranks.argmin(1), np.arange(len(active))
        gap = of_ranks[here, high] - of_ranks[here, low]
        give, take, gain = _best_pair(share[active], holds[active, high], holds[active, low], gap)
        going = (gain > 0) & (of_ranks[here, high] > (1 + worth / 2) * of_ranks.mean(1))
        active, high, low, give, take = active[going], high[going], low[going], give[going], take[going]
        if not len(active):
            break
        holds[active, high, give] = holds[active, low, take] = False
        holds[active, low, give] = holds[active, high, take] = True
    return holds.reshape(before.shape)


def _best_pair(share: Floats, high: Holds, low: Holds, gap: Floats) -> tuple[Ints, Ints, Floats]:
    """Of [N, experts] that two ranks hold, which differ by `gap` [N] in load: what each should give the other, and what that takes
    off the busier one and does not put onto the other, [N] each.
    """
    most = int(max((high & ~low).sum(1).max(), (low & ~high).sum(1).max(), 1))
    none = np.nan
    mine, theirs = np.where(high & ~low, share, none), np.where(low & ~high, share, none)
    gives, takes = np.argsort(mine, axis=1)[:, :most], np.argsort(theirs, axis=1)[:, :most]
    moved = np.take_along_axis(mine, gives, 1)[:, :, None] - np.take_along_axis(theirs, takes, 1)[:, None]
    gain = np.nan_to_num(np.minimum(moved, gap[:, None, None] - moved), nan=-1.0).reshape(len(share), -1)
    best, rows = gain.argmax(1), np.arange(len(share))
    return gives[rows, best // most], takes[rows, best % most], gain[rows, best]


def _alike(before: Holds, after: Holds, nodes: int) -> Holds:
    """`after` with its nodes, and the ranks of each, in the order in which they hold the most of what was there `before`."""
    layers, ranks, experts = after.shape
    if nodes > 1:
        whole = (layers, nodes, ranks // nodes, experts)
        by_node = _matched(_union(before.reshape(whole)), _union(after.reshape(whole)))
        after = after.reshape(whole)[np.arange(layers)[:, None], by_node]
    before, after = (holds.reshape(layers * nodes, ranks // nodes, experts) for holds in (before, after))
    return after[np.arange(len(after))[:, None], _matched(before, after)].reshape(layers, ranks, experts)


def _matched(before: Holds, after: Holds) -> Ints:
    """[N, M]: which part of `after` [N, M, experts] takes the place of each part of `before`. The most alike pairs come first."""
    count, parts, _ = before.shape
    common = np.matmul(before.astype(np.float32), after.astype(np.float32).transpose(0, 2, 1))
    taken = np.empty((count, parts), dtype=np.int64)
    rows = np.arange(count)
    for _ in range(parts):
        place, part = np.divmod(common.reshape(count, -1).argmax(1), parts)
        taken[rows, place] = part
        common[rows, place] = -1
        common[rows, :, part] = -1
    return taken


def _union(ranks: Holds) -> Holds:
    """[layers, nodes, ranks, experts] -> [layers, nodes, experts]."""
    holds: Holds = np.logical_or.reduce(ranks, axis=2)
    return holds
