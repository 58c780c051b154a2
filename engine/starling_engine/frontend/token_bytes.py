"""Which bytes a token stands for.

Text is the UTF-8 decoding of the tokens' bytes, one after the other. Seen so, a character that is spread over tokens, a stop
string that straddles tokens and the `bytes` of OpenAI's logprobs are all the same simple matter. The two families of tokenizers
that language models use fit: byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece (Llama 2, Gemma, Mistral).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol


class Spelling(Protocol):
    """How the decoder of a tokenizer.json reads its tokens."""

    @property
    def leading_spaces(self) -> int:
        """Spaces that are dropped from the very start of a text: the encoder puts one there of its own."""

    def to_bytes(self, token: str) -> bytes:
        """The bytes of a token as it stands in the vocabulary."""

    def first_to_bytes(self, token: str) -> bytes:
        """The bytes of the token that opens a text."""


@dataclass(frozen=True)
class ByteLevel:
    """GPT-2's: each character of a token is one byte."""

    leading_spaces: int = 0

    def to_bytes(self, token: str) -> bytes:
        table = _byte_of_char()
        try:
            return bytes([table[char] for char in token])
        except KeyError:
            # Added tokens are written plainly; one that holds a character outside of the table cannot be meant in bytes.
            return token.encode()

    def first_to_bytes(self, token: str) -> bytes:
        return self.to_bytes(token)


@dataclass(frozen=True)
class SentencePiece:
    """Plain text with a mark for the space; with `byte_fallback`, <0xE2> is a byte of a character that has no token.

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
    """The spelling for the `decoder` section of a tokenizer.json; None for one that joins tokens in a way of its own."""
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
    """None when a step is unknown, or known but with settings that a token by itself cannot be read with."""
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
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the code points from 256 on.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    plain = {chr(byte): byte for byte in printable}
    return plain | {chr(256 + i): byte for i, byte in enumerate(others)}
