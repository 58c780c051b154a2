"""The limit of the tokens with which a request reasons."""

from collections.abc import Sequence
from typing import Self

from starling_engine.request import ReasoningLimit


class ReasoningBudget:
    """Counts what is left of a limit. Once nothing is, the only token that is possible is the one that ends reasoning."""

    def __init__(self, limit: ReasoningLimit, output: Sequence[int] = ()) -> None:
        """Begins behind an output."""
        self._limit = limit
        self._is_open = limit.is_open
        self._left = limit.tokens
        for token in output:
            self.advance(token)

    @property
    def end(self) -> int:
        """The token that ends reasoning."""
        return self._limit.end

    def advance(self, token: int) -> None:
        """Takes a token of the output."""
        if token == (self._limit.end if self._is_open else self._limit.start):
            self._is_open = not self._is_open
        elif self._is_open:
            self._left -= 1

    def restricts(self, tokens: int) -> bool:
        """Returns whether one of the next `tokens` tokens may be the one behind the limit. To begin reasoning takes one."""
        return self._left + (not self._is_open) < tokens

    def ends_behind(self, drafts: Sequence[int]) -> int | None:
        """Returns the number of drafts behind which reasoning has to end; None if that is behind none of them."""
        budget = self._copy()
        for count, token in enumerate(drafts):
            if budget._has_to_end:
                return count
            budget.advance(token)
        return len(drafts) if budget._has_to_end else None

    @property
    def _has_to_end(self) -> bool:
        return self._is_open and self._left <= 0

    def _copy(self) -> Self:
        copy = type(self)(self._limit)
        copy._is_open, copy._left = self._is_open, self._left
        return copy
