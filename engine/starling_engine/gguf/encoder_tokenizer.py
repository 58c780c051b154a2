"""Tokenizers of encoders in a GGUF file: BERT's word pieces ("bert"), and SentencePiece's unigrams ("t5")."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from starling_engine.errors import ModelError
from starling_engine.gguf.reader import GgufFile
from starling_engine.gguf.vocabulary import CONTROL, token_id, token_scores, token_types, tokenizer_field

_SPACE = "▁"
_UNKNOWN = "[UNK]"
_UPPER_CASE = re.compile(r"[A-Z]")
_BRACKETS = re.compile(r"\[.*\]")
"""Names that older converters left as they are: special tokens, `[unused1]`, and `[PAD30522]` for rows that no token has."""


def word_piece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """Returns BERT's tokenizer. The file marks tokens that begin a word, where BERT marks the others.

    No file says if text is made lower case: it is where no token has an upper-case letter. (llama.cpp always does so.)
    """
    types = token_types(file)
    special = {token for token, type_ in zip(tokens, types, strict=False) if type_ == CONTROL}
    pieces = [token if token in special or _BRACKETS.fullmatch(token) else _piece(token) for token in tokens]
    if len(set(pieces)) != len(pieces):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
    unknown = token_id(file, "unknown_token_id", len(tokens))
    name = _UNKNOWN if unknown is None else pieces[unknown]
    backend = Tokenizer(models.WordPiece({piece: id_ for id_, piece in enumerate(pieces)}, unk_token=name))
    lower = not any(_UPPER_CASE.search(piece) for piece in pieces if not piece.startswith("[") and piece not in special)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _piece(token: str) -> str:
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"


def unigram(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """Returns XLM-RoBERTa's tokenizer, which splits at white space. Raises ModelError for a map of characters that is damaged."""
    unknown, characters = token_id(file, "unknown_token_id", len(tokens)), tokenizer_field(file, "precompiled_charsmap")
    backend = Tokenizer(models.Unigram(list(zip(tokens, token_scores(file, tokens), strict=True)), unknown, False))
    if isinstance(characters, list) and characters:
        try:
            backend.normalizer = normalizers.Precompiled(bytes(characters))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{file.path}: tokenizer.ggml.precompiled_charsmap cannot be read: {error}") from error
    scheme = "never" if file.get("tokenizer.ggml.add_space_prefix") is False else "always"
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return backend


def pair_of(kind: str, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Returns how two texts become one input: BERT's second segment, or two ends between them."""
    if kind == "bert":
        return [*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)]
    return [*before, "$A", *after, *after, "$B", *after]
