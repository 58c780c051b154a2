"""Separates a template's control tokens from those that a message spells, which are text.

A tokenizer finds `<|im_start|>` anywhere, so a user could open another turn in the middle of a message. A sentinel marks the texts
of messages: digits that are drawn for one rendering, so that nobody can know them before. Messages have it behind each character
that may begin a control token. A token that is whole in the rendered prompt was written by the template, however that cuts and
joins messages. Texts that the template itself looks for (`</think>`) stay whole.
"""

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

Span = tuple[int, int]

_SENTINEL_DIGITS = 16


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation. `control` has the positions in `text` of the control tokens that the template wrote, in order.

    None: the messages spell none, so all in the text are the template's.
    """

    text: str
    control: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class ControlTokens:
    """Finds control tokens in texts. `spellings` have at least two characters, or a sentinel could not mark them."""

    spellings: frozenset[str]

    @classmethod
    def of(cls, tokens: frozenset[str]) -> "ControlTokens":
        return cls(frozenset(token for token in tokens if len(token) > 1))

    def marked(self, value: Any, sentinel: str, sought: frozenset[str]) -> Any:
        """Returns a copy of `value` (JSON) with the sentinel in all its texts. Texts in `sought` stay whole."""
        if isinstance(value, str):
            return _mark_positions(self.spellings, sought).marked(value, sentinel)
        if isinstance(value, Mapping):
            return {self._marked_key(key, sentinel, sought): self.marked(item, sentinel, sought) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, sentinel, sought) for item in value]
        return value

    def unmarked(self, rendered: str, sentinel: str) -> ChatPrompt:
        """Returns the prompt of a text that was rendered from marked messages."""
        text, control, at, length = [], [], 0, 0
        for start, end in self.spans(rendered):
            text += [rendered[at:start].replace(sentinel, ""), rendered[start:end]]
            length += len(text[-2]) + len(text[-1])
            control.append((length - len(text[-1]), length))
            at = end
        text.append(rendered[at:].replace(sentinel, ""))
        return ChatPrompt("".join(text), tuple(control))

    def spelled(self, prompt: ChatPrompt) -> list[str]:
        """Returns the control tokens of a prompt, in order."""
        spans = self.spans(prompt.text) if prompt.control is None else prompt.control
        return [prompt.text[start:end] for start, end in spans]

    def spans(self, text: str) -> Iterator[Span]:
        """Yields the positions of control tokens as tokenizers find them: the leftmost first, of several the longest."""
        if not self.spellings:
            return
        end = 0
        for found in self._beginnings.finditer(text):
            start = found.start()
            lengths = self._lengths[text[start : start + 2]] if start >= end else ()
            if length := next((length for length in lengths if text[start : start + length] in self.spellings), 0):
                end = start + length
                yield start, end

    def _marked_key(self, key: str, sentinel: str, sought: frozenset[str]) -> str:
        """Leaves keys that are identifiers alone: a template may know the field by name."""
        return key if key.isidentifier() else str(self.marked(key, sentinel, sought))

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """Lengths by the first two characters, so that thousands of reserved tokens cost no more than a few."""
        lengths: dict[str, set[int]] = {}
        for spelling in self.spellings:
            lengths.setdefault(spelling[:2], set()).add(len(spelling))
        return {first: sorted(found, reverse=True) for first, found in lengths.items()}

    @cached_property
    def _beginnings(self) -> re.Pattern[str]:
        # A lookahead, so that the second character may begin another token.
        return re.compile("|".join(f"{re.escape(first[0])}(?={re.escape(first[1])})" for first in sorted(self._lengths)))


def turn_markers(tokens: Collection[str], written: Collection[str], sought: Collection[str]) -> frozenset[str]:
    """Returns `tokens` that templates write around messages, such as DeepSeek's `<｜User｜>`, which is not marked as special.

    Messages may contain texts that the template looks for, words, spaces, and tokens that come in pairs (`<think>`).
    """
    return frozenset(
        token
        for token in tokens
        if _is_framed(token)
        and not _is_paired(token, tokens)
        and any(token in text for text in written)
        and not any(token in text for text in sought)
    )


def _is_framed(token: str) -> bool:
    """Returns whether the token is a word between signs."""
    plain = any(end.isalnum() or end.isspace() for end in (token[0], token[-1]))
    return not plain and any(character.isalnum() for character in token)


def _is_paired(token: str, tokens: Collection[str]) -> bool:
    """Returns whether the token is one of a pair of tags."""
    name = token.removeprefix("<").removeprefix("/")
    return token.startswith("<") and f"<{name}" in tokens and f"</{name}" in tokens


def draw_sentinel() -> str:
    """Draws a sentinel, by one call of the system. No filter of a template changes, escapes or trims digits."""
    return f"{secrets.randbelow(10**_SENTINEL_DIGITS):0{_SENTINEL_DIGITS}}"


@dataclass(frozen=True)
class _MarkPositions:
    """Positions of the sentinel: behind each sign and word, never within a sought text, behind one that is in `broken`."""

    signs: tuple[str, ...]
    words: re.Pattern[str] | None
    sought: re.Pattern[str] | None
    broken: frozenset[str]

    def marked(self, text: str, sentinel: str) -> str:
        if self.sought is None:
            return self._marked_between(text, sentinel)
        # Sought texts have odd indices.
        pieces = self.sought.split(text)
        pieces[::2] = [self._marked_between(piece, sentinel) for piece in pieces[::2]]
        pieces[1::2] = [piece + sentinel if piece in self.broken else piece for piece in pieces[1::2]]
        return "".join(pieces)

    def _marked_between(self, text: str, sentinel: str) -> str:
        for sign in self.signs:
            text = text.replace(sign, sign + sentinel)
        return text if self.words is None else self.words.sub(lambda found: found[0] + sentinel, text)


@lru_cache(maxsize=64)
def _mark_positions(spellings: frozenset[str], sought: frozenset[str]) -> _MarkPositions:
    """Tokens that begin like words (`pad`) are marked only where they are spelled whole; their first letter is too frequent."""
    worded = {spelling for spelling in spellings if spelling[0].isalnum() or spelling[0].isspace()}
    signs = {spelling[0] for spelling in spellings - worded}
    sought = frozenset(text for text in sought if any(spelling[0] in text for spelling in spellings))
    words = [f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in sorted(worded)]
    texts = [re.escape(text) for text in sorted(sought, key=len, reverse=True)]
    return _MarkPositions(
        tuple(sorted(signs)),
        re.compile("|".join(words)) if words else None,
        re.compile(f"({'|'.join(texts)})") if texts else None,
        frozenset(text for text in sought if _may_begin_within(text, spellings)),
    )


def _may_begin_within(text: str, spellings: frozenset[str]) -> bool:
    """Returns whether the text ends with the beginning of a control token, whose rest may follow in the message."""
    endings = [text[at:] for at in range(len(text))]
    return any(spelling != ending and spelling.startswith(ending) for spelling in spellings for ending in endings)
