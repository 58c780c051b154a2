"""The limit of the tokens with which a request reasons."""

from collections.abc import Sequence
from typing import Self

from starling_engine.request import ReasoningLimit


class ReasoningBudget:
    """Counts what is left of a limit. Once nothing is, only the tokens that end reasoning are possible, one behind the other.

    What has begun like a mark and is none is reasoning, too; so a mark that was begun has to go on where that would be too much.
    """

    def __init__(self, limit: ReasoningLimit, output: Sequence[int] = ()) -> None:
        """Begins behind an output."""
        self._limit = limit
        self._is_open = limit.is_open
        self._left = limit.tokens
        self._matched = 0
        """Tokens that were written of the mark that comes next."""
        self._then: Sequence[Sequence[int]] = ()
        """Steps that are left of what follows the end."""
        for token in output:
            self.advance(token)

    @property
    def possible(self) -> Sequence[int]:
        """The tokens of which one has to be next; none where any may be."""
        if self._then:
            return self._then[0]
        return (self._limit.ends[self._matched],) if self._has_to_end else ()

    def advance(self, token: int) -> None:
        """Takes a token of the output."""
        self._then = self._then[1:] if self._then and token in self._then[0] else ()
        mark = self._limit.ends if self._is_open else self._limit.opens
        if token == mark[self._matched]:
            ends_here = self._has_to_end
            self._matched += 1
            if self._matched == len(mark):
                self._is_open = not self._is_open
                self._matched = 0
                self._then = self._limit.then if ends_here else ()
            return
        begins_again = token == mark[0]
        if self._is_open:
            self._left -= self._matched + (not begins_again)
        self._matched = int(begins_again)

    def restricts(self, tokens: int) -> bool:
        """Returns whether one of the next `tokens` tokens may be restricted. To begin reasoning takes as many as its mark has."""
        before = 0 if self._is_open else len(self._limit.opens) - self._matched
        free = self._left - self._matched if self._is_open else self._left + before
        return bool(self._then) or free < tokens

    def possible_behind(self, drafts: Sequence[int]) -> list[Sequence[int]]:
        """Returns `possible` behind none of the drafts, behind the first one, and so on up to one that is not possible."""
        budget = self._copy()
        found = [budget.possible]
        for token in drafts:
            if found[-1] and token not in found[-1]:
                break
            budget.advance(token)
            found.append(budget.possible)
        return found

    def forced(self, most: int) -> list[int]:
        """Returns up to `most` tokens that come next whatever the model says."""
        budget, tokens = self._copy(), list[int]()
        while len(tokens) < most and len(budget.possible) == 1:
            tokens += budget.possible
            budget.advance(tokens[-1])
        return tokens

    @property
    def _has_to_end(self) -> bool:
        return self._is_open and self._left <= self._matched

    def _copy(self) -> Self:
        copy = type(self)(self._limit)
        copy._is_open, copy._left, copy._matched, copy._then = self._is_open, self._left, self._matched, self._then
        return copy
