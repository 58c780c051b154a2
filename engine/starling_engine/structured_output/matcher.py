"""Grammars as constraints of requests."""

import ctypes
import os
from array import array
from collections.abc import Collection, Sequence
from functools import cache
from typing import cast

import llguidance

from starling_engine.constraint import MaskRow

LIMITS = llguidance.LLParserLimits()
"""Limits of building and of a step: the library's own, which refuse what would take seconds."""


class GrammarMatcher:
    """A `Constraint`: the place in a grammar behind what a request has sampled.

    `ends` are tokens with which the caller ends an output, beside those of the vocabulary: allowed wherever the grammar may end.
    Without `drafts` there are none: where the caller forbids to end, no token is possible behind a draft that ends the output.
    """

    def __init__(self, matcher: llguidance.LLMatcher, words: int, ends: Collection[int] = (), *, drafts: bool = True) -> None:
        self.words = words
        self._drafts = drafts and not ends
        self.error: str | None = None
        self._matcher = matcher
        self._run: Sequence[int] | None = None
        """Tokens that are forced, found at once: the library takes a microsecond for each byte, and for each mask again."""
        self._at = 0
        """Number of those that were sampled."""
        self._ends = tuple(ends)
        self._check()

    @staticmethod
    def fill(rows: Sequence[MaskRow], bits: bytearray) -> None:
        size = 4 * rows[0].constraint.words
        masked = []
        for constraint, drafts, first in rows:
            matcher = cast("GrammarMatcher", constraint)
            forced = matcher._forced(len(drafts) + 1)
            if len(forced) > len(drafts) and list(forced[:-1]) == list(drafts):
                _allow_alone(forced, bits, first, size)
            else:
                masked.append((matcher, drafts, first))
        _fill(masked, bits, size)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._at += 1
        if self._run is not None and self._at >= len(self._run):
            self._run = None
        self._check()

    def replay(self, tokens: "array[int] | Sequence[int]") -> None:
        """Takes an output that was sampled under the same grammar before."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    @property
    def is_finished(self) -> bool:
        return self.error is None and self._matcher.is_stopped()

    def forced(self, most: int) -> Sequence[int]:
        return self._forced(most) if self._drafts else ()

    def allowed(self, drafts: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(drafts)) if self._drafts else 0

    def _forced(self, most: int) -> Sequence[int]:
        if self._run is None:
            self._run, self._at = self._matcher.compute_ff_tokens(), 0
        return self._run[self._at : self._at + most]

    def _check(self) -> None:
        """Sets `error` where the matcher has failed. A failed one says that it has ended, and allows to end."""
        if self.error is None and self._matcher.is_error():
            self.error = self._matcher.get_error().partition("\n")[0]


def _allow_alone(tokens: Sequence[int], bits: bytearray, first: int, size: int) -> None:
    """Writes masks of `size` bytes, from number `first` on, that allow one token each."""
    bits[size * first : size * (first + len(tokens))] = bytes(size * len(tokens))
    for nth, token in enumerate(tokens, first):
        bits[size * nth + token // 8] = 1 << token % 8


def _fill(masked: Sequence[tuple[GrammarMatcher, Sequence[int], int]], bits: bytearray, size: int) -> None:
    """Has the library write the masks, in threads."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(bits))
    alone = [(matcher._matcher, first) for matcher, drafts, first in masked if not drafts]
    if alone:
        _executor().unsafe_compute_mask_ptr(alone, address, size, len(bits) // size)
    drafted = [(matcher._matcher, first, list(drafts)) for matcher, drafts, first in masked if drafts]
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, address, size, len(bits) // size)
    for matcher, _, first in masked:
        matcher._check()
        if matcher._ends and matcher._matcher.is_accepting():
            for token in matcher._ends:
                bits[size * first + token // 8] |= 1 << token % 8


@cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor(len(os.sched_getaffinity(0)))
