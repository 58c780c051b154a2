"""vLLM's `bad_words`, for words of one token: such a token is banned."""

from collections.abc import Sequence

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.tokenizer import Tokenizer

from starling_agent.openai.protocol.base import shown

MAX_BAD_WORDS = 1024


def banned_tokens(words: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of the words, at the start of a text and after a space.

    Raises InvalidRequest for a word of several tokens: the engine does not track sequences while it samples.
    """
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"at most {MAX_BAD_WORDS} words, got {len(words)}", "bad_words")
    banned: list[int] = []
    for i, word in enumerate(words):
        banned += _tokens_of(word, f"bad_words[{i}]", tokenizer)
    return banned


def _tokens_of(word: str, param: str, tokenizer: Tokenizer) -> list[int]:
    bare = word.strip()
    if not bare or len(bare) > 256:
        raise InvalidRequest(f"a bad word must have 1 to 256 characters, got {len(bare)}", param)
    alone = tokenizer.encode(bare, add_special_tokens=False)
    if len(alone) != 1:
        raise InvalidRequest(f"{shown(bare)} is {len(alone)} tokens; only words of one token can be banned yet", param)
    spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
    return alone + (spaced if len(spaced) == 1 and spaced != alone else [])
