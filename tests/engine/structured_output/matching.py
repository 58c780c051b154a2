"""Asks the library itself, byte by byte, what the grammar of a schema or of a form accepts."""

import json
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any

import llguidance
from starling_engine.params import StructuredOutputsParams
from starling_engine.structured_output import json_grammar
from starling_engine.structured_output.forms import grammar_of
from starling_engine.structured_output.special_tokens import ReasoningMarks, SpecialTokens

SPELLINGS = 720
"""Orders of an object's keys that are tried: the grammar fixes one."""


END, THINK, UNTHINK, CALL = range(256, 260)
SPECIAL = {"<end>": END, "<think>": THINK, "</think>": UNTHINK, "<call>": CALL}


class _Bytes:
    """A vocabulary of the 256 bytes and special tokens, of which the first is an end."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = tuple(SPECIAL.values())
    tokens = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in SPECIAL))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=260)
TOKENS = SpecialTokens(SPECIAL, frozenset((END,)))
MARKS = ReasoningMarks.find(SPECIAL, lambda text: [*text.encode()])


class Matcher:
    """Tells whether texts and values are accepted from beginning to end."""

    def __init__(self, schema: Any) -> None:
        """Raises `InvalidRequest` where the schema is refused."""
        self._start = llguidance.LLMatcher(TOKENIZER, json_grammar(schema), log_level=0)
        assert not self._start.is_error(), self._start.get_error()

    def accepts_text(self, text: str) -> bool:
        return _accepts(self._start, [*text.encode(), END])

    def accepts(self, value: Any) -> bool:
        """Returns whether the value is accepted in any order of its keys."""
        return any(self.accepts_text(text) for text in islice(_spellings(value), SPELLINGS))


class FormMatcher:
    """Tells whether outputs of a form are accepted from beginning to end. An output is a text, or a list of texts and tokens."""

    def __init__(self, *, reasoning_open: bool = False, marks: ReasoningMarks | None = MARKS, **wanted: Any) -> None:
        """Raises `InvalidRequest` where the form is refused."""
        grammar = grammar_of(StructuredOutputsParams(**wanted), TOKENS, marks, reasoning_open=reasoning_open)
        self._start = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
        assert not self._start.is_error(), self._start.get_error()

    def accepts(self, output: str | list[str | int]) -> bool:
        pieces = [output] if isinstance(output, str) else output
        tokens = [token for piece in pieces for token in (piece.encode() if isinstance(piece, str) else [piece])]
        return _accepts(self._start, [*tokens, END])


def _accepts(start: llguidance.LLMatcher, tokens: list[int]) -> bool:
    return start.deep_copy().validate_tokens(tokens) == len(tokens)


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
