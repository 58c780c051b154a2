"""A token bucket: room for a burst, refilled evenly."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Holds up to `capacity` tokens, and gets `rate` a second. `level`, at the time `filled`, may be below 0: that is a debt."""

    capacity: float
    rate: float
    level: float
    filled: float

    @classmethod
    def full(cls, capacity: float, seconds: float, now: float) -> "TokenBucket":
        """Returns a full bucket that an empty one becomes in so many seconds."""
        return cls(capacity, capacity / seconds, capacity, now)

    def refill(self, now: float) -> None:
        self.level = min(self.capacity, self.level + (now - self.filled) * self.rate)
        self.filled = now

    def seconds_until(self, level: float) -> float:
        """Returns the seconds, from the last refill on, until that level is reached."""
        return max(0.0, level - self.level) / self.rate
