"""Control tokens that somebody spells out in a message are text, not control tokens.

A tokenizer finds `<|im_start|>` wherever it stands, so a user could open another turn in the middle of a message. Who wrote which
part of a rendered prompt is told by a sentinel: digits that are drawn for one rendering, so that nobody can know them before. The
messages carry it behind each character with which a control token may begin. What is whole in the rendered prompt was written by
the template, whatever that cuts out of messages or puts together. What the template itself looks for (`</think>`) stays as it is.
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
    """A rendered conversation. `control` says where in `text` the control tokens stand that the template wrote, in order.

    None: the messages spell none, so every one in the text is the template's.
    """

    text: str
    control: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class ControlTokens:
    """Finds control tokens in texts. `spellings` have at least two characters: another one could not be told from its text."""

    spellings: frozenset[str]

    @classmethod
    def of(cls, tokens: frozenset[str]) -> "ControlTokens":
        return cls(frozenset(token for token in tokens if len(token) > 1))

    def marked(self, value: Any, sentinel: str, sought: frozenset[str]) -> Any:
        """A copy of `value`, which is JSON, with the sentinel in all its texts. `sought` ones are left whole."""
        if isinstance(value, str):
            return _places(self.spellings, sought).marked(value, sentinel)
        if isinstance(value, Mapping):
            return {self._marked_key(key, sentinel, sought): self.marked(item, sentinel, sought) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, sentinel, sought) for item in value]
        return value

    def unmarked(self, rendered: str, sentinel: str) -> ChatPrompt:
        """The prompt that was rendered from marked messages."""
        text, control, at, length = [], [], 0, 0
        for start, end in self.spans(rendered):
            text += [rendered[at:start].replace(sentinel, ""), rendered[start:end]]
            length += len(text[-2]) + len(text[-1])
            control.append((length - len(text[-1]), length))
            at = end
        text.append(rendered[at:].replace(sentinel, ""))
        return ChatPrompt("".join(text), tuple(control))

    def spelled(self, prompt: ChatPrompt) -> list[str]:
        """The control tokens of a prompt, in order."""
        spans = self.spans(prompt.text) if prompt.control is None else prompt.control
        return [prompt.text[start:end] for start, end in spans]

    def spans(self, text: str) -> Iterator[Span]:
        """Where control tokens stand: the leftmost first, of several the longest, as tokenizers find them."""
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
        """Fields that a template knows by name keep it."""
        return key if key.isidentifier() else str(self.marked(key, sentinel, sought))

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """By the first two characters, so that thousands of reserved tokens cost no more than a few."""
        lengths: dict[str, set[int]] = {}
        for spelling in self.spellings:
            lengths.setdefault(spelling[:2], set()).add(len(spelling))
        return {first: sorted(found, reverse=True) for first, found in lengths.items()}

    @cached_property
    def _beginnings(self) -> re.Pattern[str]:
        # Looking ahead, so that the second character may begin another one.
        return re.compile("|".join(f"{re.escape(first[0])}(?={re.escape(first[1])})" for first in sorted(self._lengths)))


def turn_markers(tokens: Collection[str], written: Collection[str], sought: Collection[str]) -> frozenset[str]:
    """Markers of `tokens` that templates write around messages: DeepSeek's `<｜User｜>` opens a turn, not marked as special.

    What the template looks for in messages stands there of right, and so do words, spaces and what comes in pairs (`<think>`).
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
    """Tells whether signs stand around a word."""
    plain = any(end.isalnum() or end.isspace() for end in (token[0], token[-1]))
    return not plain and any(character.isalnum() for character in token)


def _is_paired(token: str, tokens: Collection[str]) -> bool:
    """Tells whether the token begins or ends what stands between two tags."""
    name = token.removeprefix("<").removeprefix("/")
    return token.startswith("<") and f"<{name}" in tokens and f"</{name}" in tokens


def draw_sentinel() -> str:
    """Digits alone: no filter of a template changes, escapes or trims them."""
    return "".join(secrets.choice("0123456789") for _ in range(_SENTINEL_DIGITS))


@dataclass(frozen=True)
class _Places:
    """Where the sentinel goes: behind each sign and word, but nowhere in a sought text; behind one that is in `broken`."""

    signs: tuple[str, ...]
    words: re.Pattern[str] | None
    sought: re.Pattern[str] | None
    broken: frozenset[str]

    def marked(self, text: str, sentinel: str) -> str:
        if self.sought is None:
            return self._marked_between(text, sentinel)
        # What was sought stands at the odd places.
        pieces = self.sought.split(text)
        pieces[::2] = [self._marked_between(piece, sentinel) for piece in pieces[::2]]
        pieces[1::2] = [piece + sentinel if piece in self.broken else piece for piece in pieces[1::2]]
        return "".join(pieces)

    def _marked_between(self, text: str, sentinel: str) -> str:
        for sign in self.signs:
            text = text.replace(sign, sign + sentinel)
        return text if self.words is None else self.words.sub(lambda found: found[0] + sentinel, text)


@lru_cache(maxsize=64)
def _places(spellings: frozenset[str], sought: frozenset[str]) -> _Places:
    """Tokens that begin as words do (`pad`) are marked where they are spelled whole; their first letter is everywhere."""
    worded = {spelling for spelling in spellings if spelling[0].isalnum() or spelling[0].isspace()}
    signs = {spelling[0] for spelling in spellings - worded}
    sought = frozenset(text for text in sought if any(spelling[0] in text for spelling in spellings))
    words = [f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in sorted(worded)]
    texts = [re.escape(text) for text in sorted(sought, key=len, reverse=True)]
    return _Places(
        tuple(sorted(signs)),
        re.compile("|".join(words)) if words else None,
        re.compile(f"({'|'.join(texts)})") if texts else None,
        frozenset(text for text in sought if _may_begin_within(text, spellings)),
    )


def _may_begin_within(text: str, spellings: frozenset[str]) -> bool:
    """Whether the text ends with the beginning of a control token, whose rest may follow in the message."""
    endings = [text[at:] for at in range(len(text))]
    return any(spelling != ending and spelling.startswith(ending) for spelling in spellings for ending in endings)
