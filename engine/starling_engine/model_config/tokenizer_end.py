"""The token that a tokenizer's config calls its end, read without the tokenizer."""

import json
from pathlib import Path
from typing import Any

_ADDED = '"added_tokens":'
"""Stands before the vocabulary in tokenizer.json, which is many times as long. Within a text its quotes would be escaped."""


def end_of_tokenizer(folder: Path) -> int | None:
    """Returns the id of `eos_token`; None where there is none, or the files cannot be read: the tokenizer's loader says why."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        end = _text_of(config["eos_token"])
        named = {_text_of(token): int(id_) for id_, token in (config.get("added_tokens_decoder") or {}).items()}
        return named[end] if end in named else _id_in(folder / "tokenizer.json", end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _id_in(path: Path, text: str) -> int | None:
    content = path.read_text(encoding="utf-8")
    added, _ = json.JSONDecoder().raw_decode(content[content.index(_ADDED) + len(_ADDED) :].lstrip())
    return next((int(token["id"]) for token in added if token["content"] == text), None)


def _text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
