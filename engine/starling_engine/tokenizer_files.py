"""The tokenizer of a checkpoint as its files have it, read without importing transformers."""

import json
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import tokenizers

from starling_engine.errors import ModelError
from starling_engine.gguf.reader import is_gguf, open_gguf
from starling_engine.gguf.tokenizer import read_gguf_tokenizer

_log = logging.getLogger(__name__)


class TokenizerFiles(NamedTuple):
    """A tokenizer with all of its checkpoint's special tokens, those with a name (bos_token, ...), and tokenizer_config.json."""

    backend: tokenizers.Tokenizer
    named_tokens: dict[str, str]
    config: dict[str, Any]


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Reads tokenizer.json and the small files next to it, or a GGUF file. Raises ModelError when they cannot be used."""
    if is_gguf(path):
        return TokenizerFiles(*read_gguf_tokenizer(open_gguf(path)))
    config = _read_json(path / "tokenizer_config.json")
    backend = _load_backend(path)
    named, extra = _special_tokens(config, _read_json(path / "special_tokens_map.json"))
    _add_missing_tokens(backend, _added_tokens(config))
    known = [token for token in [*named.values(), *extra] if backend.token_to_id(token) is not None]
    backend.add_special_tokens(_without_those_marked(backend, known))
    # Some checkpoints have limits for training, but a prompt must never be cut or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return TokenizerFiles(backend, named, config)


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Returns the tokenizer of `read_tokenizer` as JSON. A tokenizer.json with all special tokens is it, in a third of the time.

    Raises ModelError when the files cannot be used.
    """
    file = path / "tokenizer.json"
    if file.is_file():
        config = _read_json(path / "tokenizer_config.json")
        named, extra = _special_tokens(config, _read_json(path / "special_tokens_map.json"))
        content = _decoded(file)
        added = content.get("added_tokens", [])
        ids, special = {token["id"] for token in added}, {token["content"] for token in added if token["special"]}
        has_all = ids.issuperset(_added_tokens(config)) and special.issuperset([*named.values(), *extra])
        if has_all and "model" in content:
            return {**content, "truncation": None, "padding": None}
    return cast("dict[str, Any]", msgspec.json.decode(read_tokenizer(path).backend.to_str()))


def _decoded(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read: {error}") from error


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Converts the tokenizer of a checkpoint with only a SentencePiece or tiktoken file."""
    _log.warning("%s has no tokenizer.json: transformers converts it, which takes seconds at every start", folder)
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        # Transformers names the last package that it has tried, which reads other files.
        pieces = any(folder.glob("*.model")) and find_spec("sentencepiece") is None
        hint = "; a SentencePiece file needs the package sentencepiece" if pieces else ""
        raise ModelError(f"{folder} has no tokenizer.json, and transformers cannot make one: {error}{hint}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder} has no tokenizer.json, and {type(converted).__name__} cannot be written as one")
    if backend.get_vocab().keys() <= set(converted.all_special_tokens):
        files = ", ".join(converted.vocab_files_names.values())
        raise ModelError(f"{folder} has no file with a vocabulary; {type(converted).__name__} knows {files}")
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """Reads an object; an absent file counts as an empty one. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object")
    return content


def _special_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Returns tokens with a name (bos_token, ...; some models have more: image_token, ...) and those without.

    special_tokens_map.json counts only if the config has no `added_tokens_decoder`, as in transformers.
    """
    merged = dict(config) if "added_tokens_decoder" in config else {**config, **legacy}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        merged, extra = {**merged, **extra}, []
    named = {key: text for key, value in merged.items() if key.endswith("_token") and (text := _content_of(value))}
    return named, [text for value in extra if (text := _content_of(value))]


def _content_of(token: Any) -> str | None:
    """Returns the text of a token, which is a string or an object with matching rules."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _added_tokens(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Returns the tokens that tokenizer_config.json adds, by id. Raises ModelError."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(id_.isdecimal() and _is_token(token) for id_, token in decoder.items()):
        raise ModelError("tokenizer_config.json: added_tokens_decoder must hold tokens, each with its content, by their ids")
    return {int(id_): token for id_, token in decoder.items()}


def _is_token(token: Any) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str)


def _add_missing_tokens(backend: tokenizers.Tokenizer, decoder: Mapping[int, Mapping[str, Any]]) -> None:
    """Adds the tokens that only tokenizer_config.json knows. Raises ModelError if their ids would differ."""
    known = backend.get_added_tokens_decoder()
    for id_, entry in sorted(decoder.items()):
        if id_ in known:
            continue
        rules = {key: entry[key] for key in ("lstrip", "rstrip", "normalized", "single_word", "special") if key in entry}
        backend.add_tokens([tokenizers.AddedToken(entry["content"], **rules)])
        if (actual := backend.token_to_id(entry["content"])) != id_:
            raise ModelError(f"tokenizer_config.json gives {entry['content']!r} the id {id_}, tokenizer.json {actual}")


def _without_those_marked(backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> list[tokenizers.AddedToken]:
    """Returns the `tokens` that are not special yet; marking one again would drop its matching rules."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    return [tokenizers.AddedToken(token, normalized=False, special=True) for token in tokens if token not in special]
