"""Keeps token ids of the parts of chats: the next turn of a chat has the same messages, and other chats have its system prompt.

A text is cut only where a token of the template's begins: what is before it and what follows have no tokens in common. Nor do rules
of a tokenizer reach over such a token, but for those that are left out here.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock

import tokenizers

LEAST_CHARACTERS = 128
"""Shorter parts go with those behind them: to look them up would cost as much as to encode them."""
MOST_CHARACTERS = 4 << 20
"""Characters of all parts that are kept, some 10 MB with their tokens. Those that were used least recently go first."""
SHORT_CHARACTERS = 4096
"""Texts of at most so many are encoded in the calling thread, in up to 2 ms: a thread of the library would begin later."""


def encoded(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Returns token ids. Raises TypeError for a text that is not valid Unicode, as tokenizers do."""
    if len(text) <= SHORT_CHARACTERS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    # It computes no offsets, and other threads of Python run meanwhile.
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class EncodedParts:
    """Encodes chats without the tokens that a checkpoint puts around a plain prompt. Several threads may use it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        begins = part_begins(backend)
        self._begins = re.compile("|".join(map(re.escape, begins))) if begins else None
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        """Returns token ids. Raises TypeError for a text that is not valid Unicode, as tokenizers do."""
        joined = list[int]()
        for part in self._parts(text):
            joined += self._kept_ids(part) or self._encode(part)
        return joined

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        for found in self._begins.finditer(text) if self._begins is not None else ():
            if found.start() - start >= LEAST_CHARACTERS:
                yield text[start : found.start()]
                start = found.start()
        yield text[start:]

    def _kept_ids(self, part: str) -> "array[int] | None":
        with self._lock:
            if (ids := self._kept.get(part)) is not None:
                self._kept.move_to_end(part)
        return ids

    def _encode(self, part: str) -> list[int]:
        ids = encoded(self._backend, part, add_special_tokens=False)
        with self._lock:
            if part not in self._kept:
                self._kept[part] = array("I", ids)
                self._characters += len(part)
            while self._characters > MOST_CHARACTERS:
                oldest, _ = self._kept.popitem(last=False)
                self._characters -= len(oldest)
        return ids


def part_begins(backend: tokenizers.Tokenizer) -> list[str]:
    """Returns the tokens before which a text can be cut, the longest first; none where that is not certain.

    They are found before all else, whatever stands around them, and no other added token could begin before one and reach into it.
    """
    added = [*backend.get_added_tokens_decoder().values()]
    if backend.encode_special_tokens:
        return []
    within = {character for token in added for character in token.content[1:]}
    is_sure = {token.content: _is_sure(token) and token.content[0] not in within for token in added}
    sure = (text for text, sure in is_sure.items() if sure)
    return sorted(
        (text for text in sure if all(is_sure[other] for other in is_sure if other.startswith(text))), key=len, reverse=True
    )


def _is_sure(token: tokenizers.AddedToken) -> bool:
    first = token.content[:1]
    plain = first == "_" or first.isalnum() or first.isspace() or len(token.content) < 2
    return token.special and not (plain or token.normalized or token.lstrip or token.single_word)
