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
PROBE = 16
"""Of so many requests that do not ask the tiers outside, one does beside its computing, to see whether that is still right."""


class Costs:
    """Seconds a chunk to store and to load, and a token to compute; None until it has been seen. Of the tiers outside, what was
    waited for them, and the tokens that this was worth.
    """

    def __init__(self, preempt: Preempt) -> None:
        self._preempt = preempt
        self._waited = self._worth = 0.0
        self.store: float | None = None
        self.load: float | None = None
        self.token: float | None = None

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

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_TOKENS and seconds:
            self.token = _mean(self.token, seconds / tokens)

    def swap_pays(self, tokens: int, chunks: int) -> bool:
        """Whether to keep `tokens` of a preempted request in so many chunks. What has not been measured yet is kept."""
        if self._preempt != "auto":
            return self._preempt == "swap"
        if self.token is None or self.store is None:
            return True
        return chunks * (self.store + (self.store if self.load is None else self.load)) < tokens * self.token

    def asking_pays(self) -> bool:
        """Whether to ask the tiers outside at all: one that works but is slow must not make requests slower than none."""
        return self.token is None or self._waited <= self._worth * self.token + PATIENCE


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - WEIGHT) * mean + WEIGHT * value
