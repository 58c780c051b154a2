"""ColBERT checkpoints from before sentence-transformers had a class for them: PyLate's and Stanford's. Imports no torch.

They are read as that class reads them. A marker goes before each text, which is one token where the tokenizer knows it.
"""

import string
from pathlib import Path
from typing import Any

from starling_engine.model_config.fields import Fields
from starling_engine.model_config.multi_vector import ROLES
from starling_engine.model_config.projection import ProjectionConfig

PYLATE, STANFORD = "ColBERT", "HF_ColBERT"
"""The `model_type` of PyLate's config_sentence_transformers.json, and the architecture of Stanford's config.json."""
METADATA = "artifact.metadata"
LENGTH = 32
"""Tokens of an expanded query where the files do not say."""
_MARKERS = {
    "query_length",
    "document_length",
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
}


def markers_of(saved: Fields) -> dict[str, str]:
    """Returns the markers of PyLate's texts, by the texts' role."""
    return {role: saved.text(f"{role}_prefix", "") for role in ROLES if saved.get(f"{role}_prefix") is not None}


def with_markers(saved: Fields) -> Fields:
    """Returns PyLate's config with each marker before the prompt of its role."""
    prompts = dict(saved.child("prompts").values)
    for role, marker in markers_of(saved).items():
        prompts[role] = marker + (prompts.get(role) or "").removeprefix(marker)
    return saved.with_values({"prompts": prompts})


def pylate_texts(saved: Fields, texts: Fields) -> Fields:
    """Returns sentence_bert_config.json with what PyLate has in its own config instead."""
    found: dict[str, Any] = {name: saved.get(name) for name in ("query_length", "document_length") if saved.has(name)}
    if "query_expansion" in saved.values:
        found["query_expansion"] = saved.get("query_expansion")
    elif not _MARKERS.isdisjoint(saved.values) and saved.get("do_query_expansion") is not False:
        attend = saved.boolean("attend_to_expansion_tokens", saved.boolean("attend_to_mask_tokens", False))
        length = found.pop("query_length", None) or LENGTH
        found["query_expansion"] = {"strategy": "fixed", "attend": attend, "length": length}
    return texts.with_defaults(found)


def pylate_mask(saved: Fields) -> Fields:
    """Returns what the module MultiVectorMask has in later checkpoints. Punctuation is skipped where nothing is said."""
    words = saved.texts("skiplist_words") if saved.get("skiplist_words") is not None else [*string.punctuation]
    return Fields({"skiplist_words": words}, saved.source)


def stanford_files(folder: Path) -> tuple[Fields, Fields]:
    """Returns Stanford's metadata in PyLate's fields, and those of sentence_bert_config.json, which is not there."""
    path = folder / METADATA
    read = Fields.read(path) if path.exists() else Fields({}, METADATA)
    saved = {
        "query_prefix": read.text("query_token_id", "[unused0]") + " ",
        "document_prefix": read.text("doc_token_id", "[unused1]") + " ",
        "query_length": read.integer("query_maxlen", LENGTH),
        "attend_to_mask_tokens": read.boolean("attend_to_mask_tokens", False),
        "skiplist_words": [*string.punctuation] if read.boolean("mask_punctuation", True) else [],
        **({"document_length": read.integer("doc_maxlen")} if read.has("doc_maxlen") else {}),
    }
    return Fields(saved, METADATA), Fields({}, METADATA)


def stanford_projection(folder: Path, config: Fields) -> ProjectionConfig:
    """Returns the linear layer that lies beside the encoder's tensors."""
    path = folder / METADATA
    size = Fields.read(path).integer("dim", 128) if path.exists() else 128
    hidden = config.integer("hidden_size")
    return ProjectionConfig(folder="", in_features=hidden, out_features=size, bias=False, activation="identity")
