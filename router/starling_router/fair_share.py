"""Says whose request goes on next: that of the tenant which has been served the fewest tokens for its weight.

These are the virtual token counters of "Fairness in Serving Large Language Models" (Sheng et al., 2024). A tenant's counter has
the prompt tokens that were computed for it and the tokens that it was given, divided by its weight. One that had nothing to do is
lifted to the least counter of those that wait, so that nobody saves up time. Tenants of a higher priority go before all others.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class FairShare:
    """A tenant's share of the servers. `counter` is of virtual tokens; `served` is the turn that it had last."""

    name: str = ""
    priority: int = 0
    weight: float = 1.0
    counter: float = 0.0
    served: int = 0

    def charge(self, tokens: float) -> None:
        """Counts tokens, or takes back some that were counted (below 0)."""
        self.counter += tokens / self.weight


class FairOrder:
    """The order of shares. Those of one priority are lifted by each other alone."""

    def __init__(self) -> None:
        self._turns = 0
        self._last: dict[int, FairShare] = {}

    def came(self, share: FairShare, waiting: Collection[FairShare]) -> None:
        """Lifts a share that has a request now, and had none that waits. `waiting` are the others that have."""
        last = self._last.get(share.priority)
        floors = [other.counter for other in waiting if other.priority == share.priority]
        if not floors and last is not None:
            floors = [last.counter]
        if floors:
            share.counter = max(share.counter, min(floors))

    def went(self, share: FairShare) -> None:
        """Notes that a request of the share goes on."""
        self._turns += 1
        share.served = self._turns
        self._last[share.priority] = share

    def of(self, waiting: Collection[FairShare]) -> list[FairShare]:
        """Returns the shares in the order of their turns; of equal ones the one goes first whose last turn is longest ago."""
        return sorted(waiting, key=lambda share: (-share.priority, share.counter, share.served))
