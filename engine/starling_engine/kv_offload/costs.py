"""What moving chunks and computing tokens have been measured to cost, and so which of the two is worth it."""

from starling_engine.config import Preempt

WEIGHT = 0.2
"""Of a new measurement in the running mean."""
MIN_TOKENS = 32
"""A step of fewer tokens says little of what a prompt costs."""
FADE = 0.9
"""What each ask leaves of the weight of those before it."""
PATIENCE = 0.05
ALLOWED = 1 / 32
"""What may have been waited in vain by all asks that still have weight: so many seconds, and this share of what it takes to compute
what they asked for. Quick tiers that find nothing are always asked, also on a machine that has much to do."""
KEEPING = 1 / 100
"""Share of the steps' time that writing outside may take while nobody finds there what was written."""
REPAID = 1 / 2
"""What it may take besides, of the time that steps need not compute for what was found."""
SAVED_UP, REPAID_AT_ONCE = 0.02, 1.0
"""Seconds that it may take at once of either, when it has taken none for a while."""
LONGEST_DEBT = 0.2
"""Seconds of what it took too much that are held against it: what was measured wrongly is forgotten after 20 s of steps."""
PROBE = 16
"""Of so many requests that do not ask the tiers outside, one does beside its computing, to see whether that is still right."""


class Costs:
    """Seconds a chunk to store and to load, a token to compute, and a chunk to keep outside (what it takes from steps that compute
    with the same processors); None until it has been seen. Of the tiers outside, what was waited for them, and the tokens that this
    was worth.
    """

    def __init__(self, preempt: Preempt) -> None:
        self._preempt = preempt
        self._waited = self._worth = 0.0
        self.store: float | None = None
        self.load: float | None = None
        self.token: float | None = None
        self.keep: float | None = None
        self._for_keeping = 0.0
        """Seconds that may be taken from steps; below 0, that were taken beforehand."""

    def stored(self, chunks: int, seconds: float) -> None:
        self.store = _mean(self.store, seconds / chunks)

    def loaded(self, chunks: int, seconds: float) -> None:
        self.load = _mean(self.load, seconds / chunks)

    def asked(self, seconds: float, wanted: int, spared: int, *, is_probe: bool = False) -> None:
        """A request has waited for the tiers outside: of the tokens that it wanted, it need not compute so many.

        A probe stands for those that passed.
        """
        for _ in range(PROBE if is_probe else 1):
            self._waited = FADE * self._waited + seconds
            self._worth = FADE * self._worth + max(spared, ALLOWED * wanted)
        if not is_probe:
            self._allow(REPAID * spared * (self.token or 0.0), REPAID_AT_ONCE)

    def kept(self, chunks: int, taken: float, *, free: bool) -> None:
        """So many chunks have been written outside; `free`: while no step wanted the processors that this has taken."""
        if chunks:
            self.keep = _mean(self.keep, taken / chunks)
        if not free:
            self._for_keeping = max(self._for_keeping - taken, -LONGEST_DEBT)

    def computed(self, tokens: int, seconds: float) -> None:
        self._allow(KEEPING * seconds, SAVED_UP)
        if tokens >= MIN_TOKENS and seconds:
            self.token = _mean(self.token, seconds / tokens)

    def swap_pays(self, tokens: int, chunks: int) -> bool:
        """Whether to keep `tokens` of a preempted request in so many chunks. What has not been measured yet is kept."""
        if self._preempt != "auto":
            return self._preempt == "swap"
        if self.token is None or self.store is None:
            return True
        return chunks * (self.store + (self.store if self.load is None else self.load)) < tokens * self.token

    @property
    def may_keep(self) -> bool:
        """Whether steps can do without what writing outside takes from them."""
        return self._for_keeping >= 0

    def asking_pays(self) -> bool:
        """Whether to ask the tiers outside at all: one that works but is slow must not make requests slower than none."""
        return self.token is None or self._waited <= self._worth * self.token + PATIENCE

    def _allow(self, seconds: float, most: float) -> None:
        self._for_keeping = max(self._for_keeping, min(self._for_keeping + seconds, most))


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - WEIGHT) * mean + WEIGHT * value
