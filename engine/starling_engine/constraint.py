"""Restrictions, token by token, of what a request may sample."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Constraint(Protocol):
    """The state of one request. It moves on confirmed tokens only, so a preemption changes nothing about it.

    All constraints of an engine core are of one class.
    """

    words: int
    """Words of 32 bits in the mask of one token."""

    @property
    def error(self) -> str | None:
        """Says why the constraint has no answer any more; None as long as it has."""
        ...

    @staticmethod
    def fill(rows: "Sequence[MaskRow]", bits: bytearray) -> None:
        """Writes the masks of some rows of a step to `bits`, all of whose bits are set.

        A constraint that has no answer has an `error` then. Nothing is sampled behind a draft that is not allowed: masks there stay
        as they are.
        """
        ...

    def restricts(self, tokens: int) -> bool:
        """Returns whether one of the next `tokens` tokens may be restricted. A row of others has no mask, and waits for none."""
        ...

    @property
    def is_finished(self) -> bool:
        """True when no token may follow."""
        ...

    def advance(self, token: int) -> None:
        """Takes a token that was sampled."""
        ...

    def forced(self, most: int) -> Sequence[int]:
        """Returns up to `most` tokens that come next whatever the model says: each is the only one that is allowed."""
        ...

    def allowed(self, drafts: Sequence[int]) -> int:
        """Returns how many of the drafts, from the first on, are allowed one behind the other."""
        ...


class MaskRow(NamedTuple):
    """A row that is to be masked: mask number `first` is for its next token, those behind it for the token behind each draft."""

    constraint: Constraint
    drafts: Sequence[int]
    first: int
