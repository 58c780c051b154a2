"""Whether a preempted request's keys and values are kept or computed again, by what each has been measured to cost."""

from starling_engine.config import Preempt

WEIGHT = 0.2
"""Of a new measurement in the running mean."""
MIN_TOKENS = 32
"""A step of fewer tokens says little of what a prompt costs."""


class SwapCosts:
    """Seconds a chunk to store and to load, and a token to compute; None until it has been seen."""

    def __init__(self, preempt: Preempt) -> None:
        self._preempt = preempt
        self.store: float | None = None
        self.load: float | None = None
        self.token: float | None = None

    def stored(self, chunks: int, seconds: float) -> None:
        self.store = _mean(self.store, seconds / chunks)

    def loaded(self, chunks: int, seconds: float) -> None:
        self.load = _mean(self.load, seconds / chunks)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_TOKENS and seconds:
            self.token = _mean(self.token, seconds / tokens)

    def worth(self, tokens: int, chunks: int) -> bool:
        """Whether to keep `tokens` in so many chunks. What has not been measured yet is kept."""
        if self._preempt != "auto":
            return self._preempt == "swap"
        if self.token is None or self.store is None:
            return True
        return chunks * (self.store + (self.store if self.load is None else self.load)) < tokens * self.token


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - WEIGHT) * mean + WEIGHT * value
