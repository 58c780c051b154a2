"""What came of the steps that ranks run. Imports no torch."""

import time
from collections import deque

from starling_engine.errors import RankLost
from starling_engine.step import StepResult

ALIKE_SECONDS = 3.0
"""How much later than another a rank may say that the same step failed."""


class StepResults:
    """In the order of the plans: that a step failed is known when all `ranks` have said so, by when a later one may have ended."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._submitted: deque[int] = deque()
        self._ended: dict[int, StepResult] = {}
        self._failed: dict[int, dict[int, str]] = {}
        """By step and rank, what failed. A step that failed on all ranks alike is the scheduler's to pin on a request; after one
        that failed on some, the ranks' exchanges no longer match."""
        self._failed_since = 0.0

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._submitted)

    @property
    def ready(self) -> bool:
        """Whether the oldest step's result is there. While it is not known whether all ranks failed alike, none is: what those that
        did not made of later steps may be of exchanges that no longer match.
        """
        return not self._failed and bool(self._submitted) and self._submitted[0] in self._ended

    def submit(self, step: int) -> None:
        self._submitted.append(step)

    def pop(self) -> StepResult:
        """Of the oldest step, which is `ready`."""
        return self._ended.pop(self._submitted.popleft())

    def take(self, rank: int, result: StepResult) -> None:
        """From the rank that samples, or from any that failed."""
        if result.error is not None and not self._failed_alike(rank, result.step_id, result.error):
            return
        self._ended[result.step_id] = result

    def check_alike(self, patience: float = ALIKE_SECONDS) -> None:
        """Raises RankLost where a step failed on some ranks alone, and so many seconds have passed."""
        if self._failed and time.monotonic() - self._failed_since >= patience:
            step, failed = next(iter(self._failed.items()))
            rank, error = next(iter(failed.items()))
            raise RankLost(f"rank {rank} failed at step {step}, and not all others did: {error}")

    def _failed_alike(self, rank: int, step: int, error: str) -> bool:
        """Whether it now has on all ranks."""
        failed = self._failed.setdefault(step, {})
        if not failed:
            self._failed_since = time.monotonic()
        failed[rank] = error
        if len(failed) < self._ranks:
            return False
        del self._failed[step]
        return True
