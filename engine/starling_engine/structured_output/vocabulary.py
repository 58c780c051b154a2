"""The vocabulary that grammars choose from."""

from pathlib import Path
from typing import Any

import llguidance
import msgspec

from starling_engine.config import VocabularyConfig
from starling_engine.errors import ModelError
from starling_engine.secret_names import drop_merges, rename_in_model, secret_names
from starling_engine.tokenizer_files import read_tokenizer_json

NO_VOCABULARY = "this engine has no vocabulary for grammars"


def read_vocabulary(config: VocabularyConfig) -> llguidance.LLTokenizer:
    """Returns the library's form of a checkpoint's tokenizer, in up to a second.

    Its tokens of a text spell that text, as the library expects of them where a text has to come. Grammars name special tokens
    by number: a text that spells one is made of other tokens. Added tokens that the model has no row of are left out, as no output
    has them (Gemma 3 1B's token of images). Raises ModelError where there is no such form of it.
    """
    if not config.eos_token_ids:
        raise ModelError("grammars are not possible: no token ends the model's outputs")
    tokenizer = read_tokenizer_json(Path(config.tokenizer_path))
    _leave_out_tokens(tokenizer, config.size)
    _hide_special_tokens(tokenizer)
    tokenizer["normalizer"] = _of_spaces(tokenizer.get("normalizer"))
    _add_no_space(tokenizer.get("pre_tokenizer"))
    tokenizer["decoder"] = _with_spaces(tokenizer.get("decoder"))
    try:
        content = msgspec.json.encode(tokenizer).decode()
        return llguidance.LLTokenizer(content, n_vocab=config.size, eos_token=list(config.eos_token_ids))
    except ValueError as error:
        raise ModelError(f"the grammar library cannot read the tokenizer of {config.tokenizer_path}: {error}") from None


def _leave_out_tokens(tokenizer: dict[str, Any], size: int) -> None:
    """Leaves out added tokens behind the first `size` ones, which the model's dictionary may have, too."""
    added, model = tokenizer.get("added_tokens", []), tokenizer["model"]
    tokenizer["added_tokens"] = [token for token in added if token["id"] < size]
    left_out = {token["content"] for token in added if token["id"] >= size}
    if left_out and isinstance(model["vocab"], dict):
        model["vocab"] = {token: id_ for token, id_ in model["vocab"].items() if token not in left_out}
        drop_merges(model, left_out)


def _hide_special_tokens(tokenizer: dict[str, Any]) -> None:
    """Gives special tokens names that no text has.

    The library takes all added tokens in angle brackets for special, and so these names, too.
    """
    added = tokenizer["added_tokens"]
    ids = {token["content"]: token["id"] for token in added if _is_special(token)}
    names = {text: f"<{name}>" for text, name in secret_names(ids).items()}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    rename_in_model(tokenizer["model"], names)


def _is_special(token: dict[str, Any]) -> bool:
    text: str = token["content"]
    return bool(token["special"]) or (text.startswith("<") and text.endswith(">"))


def _of_spaces(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns what writes spaces in another way, without what changes a text: Unicode's normal forms, lower case and others."""
    match normalizer:
        case {"type": "Sequence", "normalizers": parts}:
            return {"type": "Sequence", "normalizers": [kept for part in parts if (kept := _of_spaces(part))]}
        case {"type": "ByteLevel" | "Prepend"} | {"type": "Replace", "pattern": {"String": " "}}:
            return normalizer
    return None


def _add_no_space(pre_tokenizer: Any) -> None:
    """Has no space put in front of a text. Those of Metaspace and of normalizers are dropped by the library itself."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": parts}:
            for part in parts:
                _add_no_space(part)
        case {"type": "ByteLevel"}:
            pre_tokenizer["add_prefix_space"] = False


def _with_spaces(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a decoder of which the library reads the mark that tokens have for a space: it does not know Metaspace."""
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return {"type": "Sequence", "decoders": [_with_spaces(part) for part in parts]}
        case {"type": "Metaspace", "replacement": mark}:
            return {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    return decoder
