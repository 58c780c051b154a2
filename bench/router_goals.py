"""Figures of each way to the servers in the race of routers, and the goals that ours is to meet."""

from collections.abc import Mapping
from dataclasses import dataclass

HITS = 0.9
FIRST = 0.5
BALANCE = 1.3
PEERS_HITS, PEERS_FIRST = 0.97, 1.2
"""Shares of a peer's figures that count as no worse: medians of two turns of one router differ by a tenth on a shared machine."""


@dataclass(frozen=True)
class Figures:
    """`hits` are tokens found in caches, to those of one server with all of the memory. Times to first tokens are in seconds.

    `to_round_robin` is the median to that of round robin, `balance` the most computed tokens of a server to the mean.
    """

    hits: float
    median: float
    high: float
    to_round_robin: float
    balance: float


def missed(own: Figures, peers: Mapping[str, Figures]) -> list[str]:
    """Says of each goal that is not met what was seen."""
    goals = [
        (own.hits >= HITS, f"{own.hits:.3f} of one server's hit tokens; the goal is {HITS}"),
        (own.to_round_robin <= FIRST, f"first tokens take {own.to_round_robin:.2f} of round robin's median; the goal is {FIRST}"),
        (own.balance <= BALANCE, f"most computed tokens are {own.balance:.2f} of the mean; the goal is {BALANCE}"),
    ]
    for name, peer in peers.items():
        goals += [
            (own.hits >= PEERS_HITS * peer.hits, f"{name} has more hit tokens: {peer.hits:.3f} to {own.hits:.3f}"),
            (own.median <= PEERS_FIRST * peer.median, f"{name} is faster: {1e3 * peer.median:.0f} ms to {1e3 * own.median:.0f}"),
        ]
    return [seen for is_met, seen in goals if not is_met]
