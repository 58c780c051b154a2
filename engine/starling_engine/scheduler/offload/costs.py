"""What moving chunks and computing tokens have been measured to cost, and so which of the two is worth it."""

from starling_engine.config import Preempt
from starling_engine.tiers.far import CHUNK

WEIGHT = 0.2
"""Of a new measurement in the running mean."""
MIN_TOKENS = 32
"""A step of fewer tokens says little of what a prompt costs."""
PROBE = 16
"""Of so many requests that would not fetch, one does, to see whether that is still so."""


class Costs:
    """Seconds a chunk to store, to load and to fetch, and a token to compute; None until it has been seen."""

    def __init__(self, preempt: Preempt) -> None:
        self._preempt = preempt
        self._refused = 0
        self.store: float | None = None
        self.load: float | None = None
        self.fetch: float | None = None
        self.token: float | None = None

    def stored(self, chunks: int, seconds: float) -> None:
        self.store = _mean(self.store, seconds / chunks)

    def loaded(self, chunks: int, seconds: float) -> None:
        self.load = _mean(self.load, seconds / chunks)

    def fetched(self, chunks: int, seconds: float) -> None:
        """From the order to the answer: what a request waits."""
        self.fetch = _mean(self.fetch, seconds / chunks)

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

    def fetch_pays(self, groups: int) -> bool:
        """Whether to ask the tiers outside at all: a store that works but is slow must not make requests slower than none."""
        if self.fetch is None or self.token is None or groups * self.fetch < CHUNK * self.token:
            return True
        self._refused += 1
        return self._refused % PROBE == 0


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - WEIGHT) * mean + WEIGHT * value
