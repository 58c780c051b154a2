"""Grammars as constraints of requests."""

import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

import llguidance

Result = TypeVar("Result")

LIMITS = llguidance.LLParserLimits()
"""Limits of building and of a step: the library's own, which refuse what would take seconds."""

BUDGET_SECONDS = 0.5
"""Processor time of an output's masks and tokens, above `USUAL_SECONDS` each; a form that takes more ends its request.

It is not shared: the steps of all get longer by what each such output takes, before it ends.
The library's limits are of a step, and count items. An ambiguous grammar keeps below them for seconds, while items take longer.
"""
USUAL_SECONDS = 0.0005
"""Processor time of a mask or of taking a token that counts for nothing; usual ones take a fifth of it with 150,000 tokens."""

ROWS_OF_THREAD = 4
"""Masks for which another thread is woken, which takes about as long as a usual mask does: 0.1 ms with 150,000 tokens."""


class GrammarMatcher:
    """The place in a grammar behind what a request has sampled. Its methods are those of `Constraint`.

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
        self._over = 0.0
        """Processor time beyond the usual. Masks and tokens that took less make up for it, and earn nothing ahead."""
        self._ends = tuple(ends)
        self._check()

    @staticmethod
    def fill(rows: "Sequence[tuple[GrammarMatcher, Sequence[int], int]]", bits: bytearray) -> None:
        size = 4 * rows[0][0].words
        masked = []
        for matcher, drafts, first in rows:
            forced = matcher._forced(len(drafts) + 1)
            if len(forced) > len(drafts) and list(forced[:-1]) == list(drafts):
                allow_alone(forced, bits, first, size)
            else:
                masked.append((matcher, drafts, first))
        _fill(masked, bits, size)

    def advance(self, token: int) -> None:
        self._timed(1, self._matcher.consume_token, token)
        self._at += 1
        if self._run is not None and self._at >= len(self._run):
            self._run = None
        self._check()

    def replay(self, tokens: Sequence[int]) -> None:
        """Takes an output that was sampled under the same grammar before, up to an error.

        The library lets no other thread run in a call, so each token has its own.
        """
        for token in tokens:
            if self.error is None:
                self.advance(token)

    @property
    def is_finished(self) -> bool:
        return self.error is None and self._matcher.is_stopped()

    def forced(self, most: int) -> Sequence[int]:
        return self._forced(most) if self._drafts and self.error is None else ()

    def allowed(self, drafts: Sequence[int]) -> int:
        return self._timed(len(drafts), self._matcher.validate_tokens, list(drafts)) if self._drafts and self.error is None else 0

    def _forced(self, most: int) -> Sequence[int]:
        if self._run is None:
            self._run, self._at = self._timed(1, self._matcher.compute_ff_tokens), 0
        return self._run[self._at : self._at + most]

    def _write(self, drafts: Sequence[int], address: int, size: int) -> None:
        """Has the library write the mask of the next token to `address`, and behind it those behind each draft."""
        if drafts:
            write = self._matcher.unsafe_compute_mask_ptr_with_draft_token  # type: ignore[attr-defined]  # the stubs leave it out
            self._timed(len(drafts) + 1, write, address, size, list(drafts))
        else:
            self._timed(1, self._matcher.unsafe_compute_mask_ptr, address, size)

    def _timed(self, usual: int, call: Callable[..., Result], *args: Any) -> Result:
        """Calls the library, which works in the calling thread, for `usual` masks or tokens."""
        began = time.thread_time()
        result = call(*args)
        self._over = max(0.0, self._over + time.thread_time() - began - usual * USUAL_SECONDS)
        return result

    def _check(self) -> None:
        """Sets `error` where the matcher has failed, or takes too long and has not ended.

        One that failed says that it has ended, and allows to end.
        """
        if self.error is None and self._matcher.is_error():
            self.error = self._matcher.get_error().partition("\n")[0]
        if self.error is None and self._over > BUDGET_SECONDS and not self._matcher.is_stopped():
            self.error = f"it takes more than {BUDGET_SECONDS:g} s of processor time; is it ambiguous?"


def allow_alone(tokens: Sequence[int], bits: bytearray, first: int, size: int) -> None:
    """Writes masks of `size` bytes, from number `first` on, that allow one token each."""
    bits[size * first : size * (first + len(tokens))] = bytes(size * len(tokens))
    for nth, token in enumerate(tokens, first):
        bits[size * nth + token // 8] = 1 << token % 8


def allow_of(tokens: Sequence[int], bits: bytearray, nth: int, size: int) -> None:
    """Leaves in a mask those of the tokens that it allows; all of it, where it allows none of them."""
    allowed = [token for token in tokens if bits[size * nth + token // 8] & 1 << token % 8]
    if allowed:
        bits[size * nth : size * (nth + 1)] = bytes(size)
        for token in allowed:
            bits[size * nth + token // 8] |= 1 << token % 8


def _fill(masked: Sequence[tuple[GrammarMatcher, Sequence[int], int]], bits: bytearray, size: int) -> None:
    """Has the library write the masks, in this thread and others: each takes the next row, so that one may be slow.

    The library's own threads do not say which row took how long.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(bits))
    rows = iter(masked)
    others: list[Future[None]] = []
    try:
        for _ in range(min(_processors(), -(-len(masked) // ROWS_OF_THREAD)) - 1):
            others.append(_threads().submit(_write_rows, rows, address, size))
        _write_rows(rows, address, size)
    finally:
        wait(others)  # whatever failed here, they write to the address of `bits`
    for other in others:
        other.result()
    for matcher, _, first in masked:
        matcher._check()
        if matcher._ends and matcher._matcher.is_accepting():
            for token in matcher._ends:
                bits[size * first + token // 8] |= 1 << token % 8


def _write_rows(rows: Iterator[tuple[GrammarMatcher, Sequence[int], int]], address: int, size: int) -> None:
    for matcher, drafts, first in rows:
        matcher._write(drafts, address + size * first, size)


@cache
def _processors() -> int:
    return len(os.sched_getaffinity(0))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_processors(), "masks")
