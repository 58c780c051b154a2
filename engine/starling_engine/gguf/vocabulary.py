"""The vocabulary of a GGUF file as its metadata has it: ids and types of tokens. It needs no library."""

from collections.abc import Sequence
from typing import Any

from starling_engine.errors import ModelError
from starling_engine.gguf.reader import GgufFile

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens."""

ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>"),
    )
)
"""Tokens that end an answer, whichever of them the file names as its end, and whatever type it gives them (src/llama-vocab.cpp)."""


def end_token_ids(file: GgufFile) -> list[int]:
    """Returns the ids of the tokens that end an answer: those that the file names, and the usual ones."""
    count = file.count_of("tokenizer.ggml.tokens")
    named = [token_id(file, key, count) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    return list(dict.fromkeys([id_ for id_ in named if id_ is not None] + file.places_of("tokenizer.ggml.tokens", ENDS)))


def tokenizer_field(file: GgufFile, name: str) -> Any:
    """Returns a value of the metadata by its name behind "tokenizer.ggml.", None where there is none."""
    return file.get(f"tokenizer.ggml.{name}")


def token_types(file: GgufFile) -> list[Any]:
    """Returns the type of each token, empty where the file does not say."""
    found = tokenizer_field(file, "token_type")
    return found if isinstance(found, list) else []


def token_scores(file: GgufFile, tokens: Sequence[str]) -> list[float]:
    """Returns the score of each token. Raises ModelError where the file has not as many numbers."""
    scores = tokenizer_field(file, "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(each, float) for each in scores):
        raise ModelError(f"{file.path}: tokenizer.ggml.scores does not hold a number for each token")
    return scores


def token_id(file: GgufFile, name: str, count: int) -> int | None:
    """Returns the id in the field `name` of a vocabulary of `count` tokens, None where there is no such token."""
    id_ = tokenizer_field(file, name)
    # Converters write a number of 32 bits where there is no such token.
    return id_ if isinstance(id_, int) and 0 <= id_ < count else None
