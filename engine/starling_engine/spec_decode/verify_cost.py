"""The time that drafts take: measured, not assumed."""

DECAY = 0.97
"""Factor of older measurements' weight, with each new one."""
USUAL_SHARE = 0.15
"""Time of one more token over that of a step without any, where little was measured."""
TRUST = 8.0
"""Sum of squares of the steps' distances from their mean, in tokens, at which what was measured counts as much as what is usual.

What was measured is forgotten. So drafts are tried again after a while, and no step that was held up ends them for good.
"""
OUTLIER = 2.0
"""Steps that take so many times what is expected were held up by something else, and count as taking that."""


class VerifyCost:
    """The time of a step of decodes by its tokens, as a line through what was measured: `base` and `slope`, in seconds."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._share = USUAL_SHARE
        """Slope over base."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Takes the time of a step of `tokens` tokens."""
        if self._weight > 1:
            seconds = min(seconds, OUTLIER * self.of(tokens))
        self._weight = DECAY * self._weight + 1
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + tokens * tokens
        self._products = DECAY * self._products + tokens * seconds
        tokens_mean, seconds_mean = self._tokens / self._weight, self._seconds / self._weight
        usual = seconds_mean * USUAL_SHARE / (1 + USUAL_SHARE * tokens_mean)
        spread = self._squares - self._weight * tokens_mean**2
        covariance = self._products - self._weight * tokens_mean * seconds_mean
        slope = (covariance + TRUST * usual) / (spread + TRUST)
        slope = min(max(slope, 0.0), 0.999 * seconds_mean / tokens_mean)
        if seconds_mean:
            self._share = slope / (seconds_mean - slope * tokens_mean)

    def of(self, tokens: float) -> float:
        """Returns the seconds that a step of so many tokens takes."""
        mean = self._tokens / self._weight
        return self._seconds / self._weight * (1 + self._share * tokens) / (1 + self._share * mean)

    def price(self, tokens: float, gain: float) -> float:
        """Returns the probability of acceptance from which on a draft more makes a step faster for its tokens.

        The step has `tokens` tokens, and is expected to give `gain`.
        """
        return gain * self._share / (1 + self._share * tokens)
