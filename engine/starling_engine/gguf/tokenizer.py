"""The tokenizer of a GGUF file, made from its metadata.

Byte-level BPE ("gpt2") splits text by a rule that the file only names (`split_rules.py`), as llama.cpp does. SentencePiece's BPE
("llama") has its merges as scores, Gemma 4's ("gemma4") as merges. Those of encoders are in `encoder_tokenizer.py`. (llama.cpp's
src/llama-vocab.cpp.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.gguf.encoder_tokenizer import pair_of, unigram, word_piece
from starling_engine.gguf.reader import GgufFile
from starling_engine.gguf.split_rules import SPLITS
from starling_engine.gguf.vocabulary import (
    CONTROL,
    ENDS,
    NORMAL,
    USER_DEFINED,
    token_id,
    token_scores,
    token_types,
    tokenizer_field,
)

_BEGUN = ("llama-bpe", "tekken", "falcon3", "falcon-h1", "lfm2", "pixtral")
"""Names with which prompts begin with BOS where the file does not say."""
_ENDED = ("roberta-bpe", "jina-v2-code")
"""Names of RoBERTa's tokenizers: prompts end with EOS, too."""
_WHOLE_WORDS = (*_BEGUN, "glm4")
"""Names with which a word that is a token is one, whatever merges say."""

MAX_CHARACTERS = 1024
"""Longer pieces of a token are not looked up as tokens: real ones have a few dozen characters."""

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
_OF_ENCODERS = ("bert", "t5")
"""Kinds of tokenizers that encoders have alone. Their inputs begin with a token and end with one where the file does not say."""

_INSTEAD = "name a folder or repository with the model's tokenizer.json as the tokenizer (--tokenizer)"


def read_gguf_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, str], dict[str, Any]]:
    """Returns the tokenizer, its tokens with a name (bos_token, ...), and what a tokenizer_config.json would hold.

    Raises UnsupportedModel for a kind of tokenizer, or a rule for splitting, that is unknown; ModelError for what is damaged.
    """
    tokens = _texts(file, "tokens")
    kind = tokenizer_field(file, "model")
    read = _KINDS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(_KINDS)
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; supported: {known}. Or {_INSTEAD}")
    backend = read(file, tokens)
    _add_tokens(backend, tokens, token_types(file))
    named = {name: tokens[id_] for name, key in _NAMED.items() if (id_ := token_id(file, key, len(tokens))) is not None}
    if kind in _OF_ENCODERS:  # older files name these two alone
        found = {
            ours: named[theirs] for ours, theirs in (("bos_token", "cls_token"), ("eos_token", "sep_token")) if theirs in named
        }
        named = {**found, **named}
    backend.post_processor = _ends(file, backend, named, kind)
    return backend, named, {"chat_template": _templates(file)}


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    pre = tokenizer_field(file, "pre")
    if not isinstance(pre, str) or pre not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {known}. Or {_INSTEAD}")
    backend = Tokenizer(_bpe(file, tokens, _written_merges(file), ignore_merges=pre in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in SPLITS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    scores, types = token_scores(file, tokens), token_types(file)
    normal = {token: id_ for id_, (token, type_) in enumerate(zip(tokens, types, strict=False)) if type_ in (NORMAL, USER_DEFINED)}
    prefix = file.get("tokenizer.ggml.add_space_prefix") is not False
    return _pieces(file, tokens, list(_merges(normal, scores)), prefix=prefix)


def _gemma(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    return _pieces(file, tokens, _written_merges(file), prefix=False)


def _pieces(file: GgufFile, tokens: Sequence[str], merges: list[Any], *, prefix: bool) -> Tokenizer:
    """Returns BPE over characters, in which spaces are one of their own, and bytes are tokens."""
    unknown = token_id(file, "unknown_token_id", len(tokens))
    options = {} if unknown is None else {"unk_token": tokens[unknown], "fuse_unk": True}
    backend = Tokenizer(_bpe(file, tokens, merges, byte_fallback=True, **options))
    prepend = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


_KINDS: Mapping[str, Callable[[GgufFile, Sequence[str]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "gemma4": _gemma,
    "bert": word_piece,
    "t5": unigram,
}


def _written_merges(file: GgufFile) -> list[Any]:
    return [tuple(merge.split(" ")) for merge in _texts(file, "merges")]


def _bpe(file: GgufFile, tokens: Sequence[str], merges: list[Any], **options: Any) -> models.BPE:
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file.path}: tokenizer.ggml.merges cannot be read: {error}") from error


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yields the pairs of tokens that make another one, the likeliest first; pairs of one token by their ids."""
    for token in sorted(vocabulary, key=lambda token: (-scores[vocabulary[token]], vocabulary[token])):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, min(len(token), MAX_CHARACTERS)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Marks the tokens that are found as they are in a text, before it is split."""
    typed = [(token, CONTROL if token in ENDS else type_) for token, type_ in zip(tokens, types, strict=False)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, type_ in typed if type_ == CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, type_ in typed if type_ == USER_DEFINED])


def _ends(file: GgufFile, backend: Tokenizer, named: Mapping[str, str], kind: str) -> Any:
    """Returns what puts BOS before a prompt, and EOS behind it, where the file wants that."""
    wants_bos = file.get("tokenizer.ggml.add_bos_token")
    if wants_bos is None:
        wants_bos = kind != "gpt2" or tokenizer_field(file, "pre") in (*_BEGUN, *_ENDED)
    wants_eos = file.get("tokenizer.ggml.add_eos_token")
    if wants_eos is None:
        wants_eos = kind in _OF_ENCODERS or tokenizer_field(file, "pre") in _ENDED
    before = [named["bos_token"]] if wants_bos and "bos_token" in named else []
    after = [named["eos_token"]] if wants_eos and "eos_token" in named else []
    own = processors.ByteLevel(trim_offsets=False) if kind == "gpt2" else None
    if not before and not after:
        return own
    ids = [(token, backend.token_to_id(token)) for token in (*before, *after)]
    pair = {"pair": pair_of(kind, before, after)} if kind in _OF_ENCODERS else {}
    template = processors.TemplateProcessing(single=[*before, "$A", *after], **pair, special_tokens=ids)
    return template if own is None else processors.Sequence([own, template])


def _templates(file: GgufFile) -> list[dict[str, str]]:
    """Returns chat templates by name, as a tokenizer_config.json has several."""
    others = file.get("tokenizer.chat_templates")
    keys = {"default": "tokenizer.chat_template"}
    keys |= {str(name): f"tokenizer.chat_template.{name}" for name in (others if isinstance(others, list) else [])}
    found = {name: file.get(key) for name, key in keys.items()}
    return [{"name": name, "template": template} for name, template in found.items() if isinstance(template, str)]


def _texts(file: GgufFile, name: str) -> list[str]:
    found = tokenizer_field(file, name)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ModelError(f"{file.path}: tokenizer.ggml.{name} is missing or no list of strings; {_INSTEAD}")
    return found
