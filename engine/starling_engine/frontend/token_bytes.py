"""The bytes of tokens.

Text is the UTF-8 decoding of the tokens' bytes, one after the other. This solves three problems at once: characters spread over
tokens, stop strings across tokens, and the `bytes` of OpenAI's logprobs. Both families of tokenizers fit: byte-level BPE (GPT-2,
Llama 3, Qwen) and SentencePiece (Llama 2, Gemma, Mistral).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol


class Spelling(Protocol):
    """The way in which the decoder of a tokenizer.json reads tokens."""

    @property
    def leading_spaces(self) -> int:
        """Spaces to drop at the very start of a text, where the encoder adds one."""

    def to_bytes(self, token: str) -> bytes:
        """Returns the bytes of a token, given as in the vocabulary."""

    def first_to_bytes(self, token: str) -> bytes:
        """Returns the bytes of the first token of a text."""


@dataclass(frozen=True)
class ByteLevel:
    """GPT-2's spelling: each character of a token is one byte."""

    leading_spaces: int = 0

    def to_bytes(self, token: str) -> bytes:
        table = _byte_of_char()
        try:
            return bytes([table[char] for char in token])
        except KeyError:
            # Added tokens are plain text; a character that is not in the table cannot be a byte.
            return token.encode()

    def first_to_bytes(self, token: str) -> bytes:
        return self.to_bytes(token)


@dataclass(frozen=True)
class SentencePiece:
    """Plain text with a mark for the space; with `byte_fallback`, <0xE2> is a byte of a character without a token.

    `replacements` are applied to each token in order. `metaspace` is the mark of the Metaspace decoder, which drops every mark
    of a text's first token if `drops_first`.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    metaspace: str = ""
    drops_first: bool = False
    leading_spaces: int = 0

    def to_bytes(self, token: str) -> bytes:
        return self._to_bytes(token, " ")

    def first_to_bytes(self, token: str) -> bytes:
        return self._to_bytes(token, "" if self.drops_first else " ")

    def _to_bytes(self, token: str, space: str) -> bytes:
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.metaspace:
            token = token.replace(self.metaspace, space)
        return token.encode()


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling | None:
    """Returns the spelling for the `decoder` section of a tokenizer.json; None if it joins tokens in another way."""
    if decoder is None:
        return None
    steps: Sequence[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    if not {"Replace", "Metaspace"} & set(kinds):
        return None
    return _sentence_piece(steps)


def _sentence_piece(steps: Sequence[Mapping[str, Any]]) -> SentencePiece | None:
    """Returns None for an unknown step, or settings with which a token alone cannot be read."""
    found: dict[str, Any] = {"replacements": ()}
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                pass
            case {"type": "ByteFallback"}:
                found["byte_fallback"] = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                found["replacements"] += ((old, new),)
            case {"type": "Metaspace", "replacement": str(mark)}:
                found |= {"metaspace": mark, "drops_first": step.get("prepend_scheme", "always") != "never"}
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                found["leading_spaces"] = start
            case _:
                return None
    return SentencePiece(**found)


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


@cache
def _byte_of_char() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable bytes stand for themselves, the others for the code points from 256 on.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    plain = {chr(byte): byte for byte in printable}
    return plain | {chr(256 + i): byte for i, byte in enumerate(others)}
