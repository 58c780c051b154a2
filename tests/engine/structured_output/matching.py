"""Asks the library itself, byte by byte, what the grammar of a schema accepts."""

import json
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any

import llguidance
from starling_engine.structured_output import json_grammar

SPELLINGS = 720
"""Orders of an object's keys that are tried: the grammar fixes one."""


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257)


class Matcher:
    """Tells whether texts and values are accepted from beginning to end."""

    def __init__(self, schema: Any) -> None:
        """Raises `InvalidRequest` where the schema is refused."""
        self._start = llguidance.LLMatcher(TOKENIZER, json_grammar(schema), log_level=0)
        assert not self._start.is_error(), self._start.get_error()

    def accepts_text(self, text: str) -> bool:
        tokens = [*text.encode(), 256]
        return self._start.deep_copy().validate_tokens(tokens) == len(tokens)

    def accepts(self, value: Any) -> bool:
        """Returns whether the value is accepted in any order of its keys."""
        return any(self.accepts_text(text) for text in islice(_spellings(value), SPELLINGS))


def _spellings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for entries in permutations(value.items()):
            names = [json.dumps(name, ensure_ascii=False) for name, _ in entries]
            for values in product(*(tuple(islice(_spellings(child), SPELLINGS)) for _, child in entries)):
                yield "{" + ",".join(f"{name}:{text}" for name, text in zip(names, values, strict=True)) + "}"
    elif isinstance(value, list):
        for items in product(*(tuple(islice(_spellings(child), SPELLINGS)) for child in value)):
            yield "[" + ",".join(items) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)
