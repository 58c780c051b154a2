"""Names of tokens that no text has."""

import secrets
from collections.abc import Container, Mapping
from typing import Any

_SECRET_DIGITS = 20


def secret_names(tokens: Mapping[str, int]) -> dict[str, str]:
    """Returns another name for each token. Names are digits, which no normalizer changes."""
    secret = "".join(secrets.choice("0123456789") for _ in range(_SECRET_DIGITS))
    return {token: f"{secret}{id_:09d}" for token, id_ in tokens.items()}


def rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames tokens in a tokenizer's model, which is the JSON of its file, so that no text becomes one of them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    drop_merges(model, names)


def drop_merges(model: dict[str, Any], tokens: Container[str]) -> None:
    """Drops the merges of these tokens, and those that make one."""
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not (pair[0] in tokens or pair[1] in tokens or pair[0] + pair[1] in tokens)]
