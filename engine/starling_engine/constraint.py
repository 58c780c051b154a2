"""Restrictions, token by token, of what a request may sample: a grammar, for one."""

from collections.abc import Sequence
from typing import Protocol


class Constraint(Protocol):
    """The state of one request. It moves on confirmed tokens only, so a preemption changes nothing about it."""

    words: int
    """Words of 32 bits in the mask of one token."""

    def fill(self, drafts: Sequence[int], bits: memoryview) -> None:
        """Writes the mask of the next token to `bits` (bytes), and behind it that of the token behind each draft.

        Behind a draft that is not allowed nothing is sampled, so its masks may be anything. Raises ValueError for a constraint
        that has no answer any more.
        """
        ...

    def advance(self, token: int) -> bool:
        """Takes a token that was sampled; returns True if none may come behind it."""
        ...
