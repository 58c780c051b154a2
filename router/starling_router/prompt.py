"""Reads of a request's body what a router needs: its prompt as blocks, by which it is found in caches."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

CHUNK_BYTES = 256
"""A prompt's text is compared in chunks of so many bytes, some 64 tokens."""
MOST_CHUNKS = 4096
"""Chunks of a prompt that are compared: a longer one would push all others out of what is remembered."""
TOKEN_BYTES = 4
"""Bytes of text that a token has in the mean: only the order of magnitude matters."""


class RoutedBody(msgspec.Struct):
    """The fields of a body that a router reads, as they stand in it. All else is the agent's to check."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()

    def texts(self) -> Iterator[bytes]:
        """Yields what a prompt is made of, in the order in which templates write it."""
        for part in (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input):
            yield bytes(part)


_DECODER = msgspec.json.Decoder(RoutedBody)


def read_body(data: bytes) -> RoutedBody:
    """Reads a body. One that cannot be read is text: the agent says what is wrong with it, or takes it, as it does NaN."""
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError:
        return RoutedBody(prompt=msgspec.Raw(data))


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt of some `tokens`, as hashes of its blocks, each of which stands for those before it, too.

    exact   they are the engine's own; otherwise blocks are of text, and tokens are estimated
    """

    tokens: int
    blocks: Sequence[int]
    block_tokens: int
    exact: bool = False


NO_PROMPT = RoutedPrompt(0, (), 1)


def text_prompt(body: RoutedBody, owner: bytes) -> RoutedPrompt:
    """Returns a prompt by its text. Equal texts of different owners or salts have no block in common, as in engines."""
    text = b"\0".join(body.texts())
    head = hashlib.blake2b(owner + b"\0" + bytes(body.cache_salt), digest_size=8).digest()
    blocks = []
    for start in range(0, min(len(text), MOST_CHUNKS * CHUNK_BYTES) - CHUNK_BYTES + 1, CHUNK_BYTES):
        head = hashlib.blake2b(head + text[start : start + CHUNK_BYTES], digest_size=8).digest()
        blocks.append(int.from_bytes(head, "big"))
    return RoutedPrompt(max(1, len(text) // TOKEN_BYTES), blocks, CHUNK_BYTES // TOKEN_BYTES)
