"""Names of a checkpoint's tensors, which depend on the class of transformers that has saved it.

Here a decoder's are those of the class with a head, an encoder's those of the class without.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from starling_engine.model_config.stored_names import stored_names

_PREFIX = "model."
"""Beginning of the names that a checkpoint of a decoder with a head has, and one without, as AutoModel saves it, lacks."""
_TEXT = "language_model."
"""The same of the text part of a model that has more parts: behind `_PREFIX`, or before it and before the head's name."""
_EMBEDDING = "embed_tokens.weight"
_ADAPTED = ".parametrizations.weight"
"""Part of names that torch gives to a matrix with a parametrization, and to the tensors of this."""
_ENCODER_EMBEDDINGS = (
    *("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight"),
    f"embeddings.word_embeddings{_ADAPTED}.original",
)
_BELOW = {"wte.weight": "transformer.", "decoder.embed_tokens.weight": _PREFIX}
"""Beginnings of the names of GPT-2 and OPT, by embeddings that lack them in published files."""
_HEADS = ("lm_head.", "score.", "classifier.")
"""Beginnings of the names of heads, which such files may have, too."""
_AUTHORS_EMBEDDING = "embed.weight"
"""The embedding in DeepSeek-V4's own checkpoints, whose names have no `_PREFIX`, and whose scales have names of their own."""
_AUTHORS_NAMES = {
    "head.weight": "lm_head.weight",
    _AUTHORS_EMBEDDING: _PREFIX + _EMBEDDING,
    **{f"hc_head_{each}": f"{_PREFIX}hc_head.hc_{each}" for each in ("fn", "base", "scale")},
}
_OTHER_ENDINGS = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    ".attention_layer_norm.weight": ".input_layernorm.weight",
    ".feedforward_layer_norm.weight": ".post_attention_layernorm.weight",
    "backbone.embedding.weight": "backbone.embeddings.weight",
    f"{_ADAPTED}.original": ".weight",
    f"{_ADAPTED}.0.lora_A": ".lora_A",
    f"{_ADAPTED}.0.lora_B": ".lora_B",
}
"""Endings of the first BERTs, which TensorFlow has named, of OLMo Hybrid's norms, of Mamba-2's own authors, and of adapters."""


def model_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns the stored name of each tensor by its name here."""
    stored = list(stored)
    if _AUTHORS_EMBEDDING in stored:
        return {_of_authors(name): name for name in stored}
    below = next((each for name, each in _BELOW.items() if name in stored), None)
    if below is not None:
        return {name if name.startswith(_HEADS) else below + name: name for name in stored}
    added = _PREFIX if _EMBEDDING in stored else ""
    if f"{_TEXT}{_PREFIX}{_EMBEDDING}" in stored:
        return {name.removeprefix(_TEXT): name for name in stored}
    text = next((each for each in (f"{_PREFIX}{_TEXT}", _TEXT) if f"{each}{_EMBEDDING}" in stored), None)
    if text is not None:
        return {_PREFIX + _new_ending(name.removeprefix(text)) if name.startswith(text) else name: name for name in stored}
    removed = next((name.removesuffix(end) for name in stored for end in _ENCODER_EMBEDDINGS if name.endswith(f".{end}")), "")
    return {f"{added}{_new_ending(name.removeprefix(removed))}": name for name in stored}


def _of_authors(name: str) -> str:
    """Returns the name of a tensor of DeepSeek-V4's own checkpoints."""
    module = name.removesuffix(".scale")
    return _AUTHORS_NAMES.get(name) or _PREFIX + (name if module == name else f"{module}.weight_scale")


def _new_ending(name: str) -> str:
    for old, new in _OTHER_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def has_base_names(names: Collection[str]) -> bool:
    """Says if these are the tensors of a decoder without a head, or of GPT-2 or OPT with one that is tied."""
    if not _BELOW.keys().isdisjoint(names):
        return not any(name.startswith(_HEADS) for name in names)
    return _EMBEDDING in names or _TEXT + _EMBEDDING in names


def is_base_model(folder: Path) -> bool:
    """Says if the folder's files are of a decoder without a head. What cannot be read is not: the loader says what is wrong."""
    return has_base_names(stored_names(folder))
