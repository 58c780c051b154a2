"""Turns token ids into text as they come, without ever showing half a character."""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from starling_engine.frontend.token_bytes import Spelling
from starling_engine.frontend.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8
"""Tokens of the prompt's end: enough for a character that it cuts, and for decoders that look at the neighbour."""


class TextStream(Protocol):
    """Text of an output. `feed` returns the text that became certain with this token; `finish` the rest, once."""

    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


def text_stream(
    tokenizer: Tokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = (), shown_ids: Collection[int] = ()
) -> TextStream:
    """Returns a stream of the text after the prompt's, or without a prompt of a whole sequence.

    All of it equals decode(prompt + output) without decode(prompt). Special tokens in `shown_ids` are not skipped.
    """
    hidden = tokenizer.special_ids.difference(shown_ids) if skip_special_tokens else frozenset()
    context = _visible_end(tokenizer, prompt_ids) if skip_special_tokens else prompt_ids[-_CONTEXT_TOKENS:]
    if tokenizer.spelling is None:
        return WindowStream(tokenizer, hidden, context)
    return ByteStream(tokenizer, tokenizer.spelling, hidden, context)


def _visible_end(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """Returns the last tokens that are not special: a chat's prompt may end in several special ones."""
    end: list[int] = []
    for token_id in reversed(prompt_ids):
        if token_id not in tokenizer.special_ids:
            end.append(token_id)
            if len(end) == _CONTEXT_TOKENS:
                break
    return end[::-1]


class ByteStream:
    """Streams text of tokenizers whose tokens are bytes, in constant time for each token.

    Equal to `decode` of the whole for byte-level tokenizers. For SentencePiece, a run of <0xNN> tokens that is not UTF-8 differs:
    here its valid characters stay, `decode` replaces each byte of the run.
    """

    def __init__(self, tokenizer: Tokenizer, spelling: Spelling, hidden: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._spelling = spelling
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._opened = False
        self._strip = spelling.leading_spaces
        for token_id in context:
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._opened and not self._strip:
            return self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return self._feed_opening(token_id)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _feed_opening(self, token_id: int) -> str:
        """Reads the first tokens without the space that the encoder puts before a text."""
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return ""
        data = self._spelling.to_bytes(token) if self._opened else self._spelling.first_to_bytes(token)
        self._opened = True
        text = self._decoder.decode(data)
        spaces = min(self._strip, len(text) - len(text.lstrip(" ")))
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]


class WindowStream:
    """Streams text of any other decoder (</w> suffixes, ## prefixes, none): decodes the last tokens with and without the new one.

    Each token decodes the text since the last certain point again. A long run of broken characters has no such point, and costs its
    length squared.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = list(context)
        self._shown = len(self._ids)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        before, after = self._texts()
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._texts()
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._ids[: self._shown], skip_special_tokens=False)
        return before, self._tokenizer.decode(self._ids, skip_special_tokens=False)
