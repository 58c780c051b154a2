"""How long it takes to place experts by their load, and how well that balances them.

    python bench/eplb.py

256 experts of a layer and 32 redundant ones over 32 ranks, as DeepSeek-V3 is served. Loads are drawn from a Pareto distribution,
whose tail is about that of real traffic of one kind. "Changed" is a second placement, after every load became 0.5 to 1.5 times as
large. Writes bench/results/eplb.md.
"""

import time
from pathlib import Path

import numpy as np
from shared import machine
from starling_engine.expert_parallel.eplb import rebalance
from starling_engine.expert_parallel.load import Floats, imbalance
from starling_engine.topology.placement import Placement, moves, spread

RESULTS = Path(__file__).parent / "results" / "eplb.md"
EXPERTS, RANKS, SLOTS, NODES, GROUPS = 256, 32, 9, 4, 8
TRIES = 5


def fastest(load: Floats, previous: Placement | None = None, nodes: int = 1) -> tuple[float, Placement]:
    """Seconds, the best of some."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        placement = rebalance(load, RANKS, SLOTS, nodes, GROUPS, previous)
        times.append(time.perf_counter() - began)
    return min(times), placement


def share_moved(before: Placement, after: Placement) -> float:
    moved = sum(len(layer) for rank in range(RANKS) for layer in moves(before, after, rank))
    return moved / (len(after.layers) * RANKS * SLOTS)


def main() -> None:
    lines = [
        "# Placing experts by load (EPLB)",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}.",
        f"{EXPERTS} experts, {RANKS} ranks of {SLOTS} slots. One thread, the best of {TRIES}.",
        "Imbalance is the busiest rank's load by the mean, averaged over the layers.",
        "",
        "| layers | | seconds | imbalance before | after | experts moved |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for layers in (58, 10_000):
        rng = np.random.default_rng(0)
        load = rng.pareto(1.5, (layers, EXPERTS))
        first = spread(EXPERTS, RANKS, layers, redundant=RANKS * SLOTS - EXPERTS)
        before = first
        for what, previous, nodes in (("new", None, 1), (f"new, {NODES} nodes", None, NODES), ("changed", first, 1)):
            if previous is not None:
                load, previous = load * rng.uniform(0.5, 1.5, load.shape), before
            seconds, after = fastest(load, previous, nodes)
            was, now = imbalance(load, previous or first).mean(), imbalance(load, after).mean()
            moved = share_moved(previous or first, after)
            lines.append(f"| {layers:,} | {what} | {seconds:.3f} | {was:.2f} | {now:.2f} | {moved:.0%} |")
            before = after if nodes == 1 else before
    RESULTS.write_text("\n".join([*lines, ""]))
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
