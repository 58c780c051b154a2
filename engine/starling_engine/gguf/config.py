"""The config of a model in a GGUF file: its metadata under the names of a config.json and a generation_config.json."""

import difflib
from typing import Any, Literal

from starling_engine.errors import UnsupportedModel
from starling_engine.gguf.families import FAMILIES
from starling_engine.gguf.family import GgufFamily
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.reader import GgufFile
from starling_engine.gguf.rope import DEFAULT_THETA, read_scaling
from starling_engine.gguf.vocabulary import end_token_ids

_POOLING: dict[Any, Literal["mean", "cls", "last"]] = {1: "mean", 2: "cls", 3: "last"}
"""Numbers of llama.cpp, which has some for other kinds of models besides."""

Config = dict[str, Any]


def read_config(file: GgufFile) -> tuple[Config, Config]:
    """Returns the fields of a config.json and of a generation_config.json.

    Raises UnsupportedModel for an architecture that cannot be read from GGUF, ModelError for metadata that is missing.
    """
    family = family_of(file)
    data = GgufMetadata(file, family.by_layer)
    config = {"architectures": [family.name], **(_attention(data) if family.attends else {}), **_common(data, family)}
    config |= family.fields(data)
    return config | family.head(data, config["architectures"][0]), {
        "eos_token_id": end_token_ids(file),
        **_generation_defaults(file),
    }


def family_of(file: GgufFile) -> GgufFamily:
    """Raises UnsupportedModel naming the nearest and all that are known, or what the file is where it is no model."""
    if (kind := file.get("general.type")) not in (None, "model"):
        raise UnsupportedModel(f"{file.path}: general.type is {kind!r}, and only a model can be served")
    name = file.architecture
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, sorted(FAMILIES), n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(f"{file.path}: general.architecture {name!r} is not supported{hint}; supported: {known}")
    return FAMILIES[name]


def read_pooling(file: GgufFile) -> Literal["mean", "cls", "last"] | None:
    """Returns how hidden states become a vector, if the file says so: mean, cls or last."""
    kind = GgufMetadata(file).get("pooling_type")
    return _POOLING.get(kind) if isinstance(kind, int) else None


def _common(data: GgufMetadata, family: GgufFamily) -> Config:
    file = data.file
    config = {
        "hidden_size": data.number("embedding_length"),
        "num_hidden_layers": data.num_layers,
        "max_position_embeddings": data.number("context_length"),
        family.eps: data.number("attention.layer_norm_rms_epsilon", data.get("attention.layer_norm_epsilon")),
        "vocab_size": file.count_of("tokenizer.ggml.tokens") or data.get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "dtype": _dtype(file),
        "attention_bias": "attn_q.bias" in data.modules or "attn_qkv.bias" in data.modules,
        "mlp_bias": "ffn_up.bias" in data.modules,
    }
    widths = data.get("feed_forward_length")
    if any(widths) if isinstance(widths, list) else widths:
        config["intermediate_size"] = data.number("feed_forward_length")
    return config


def _attention(data: GgufMetadata) -> Config:
    heads = data.number("attention.head_count")
    head_dim = data.number("attention.key_length", data.number("embedding_length") // heads)
    if data.get("attention.value_length", head_dim) != head_dim:
        raise data.refused("attention.value_length", "is not supported: heads of keys and values have to be equally wide")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": data.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # Families whose heads are rotated whole refuse any but 1, with their other fields.
        "partial_rotary_factor": data.number("rope.dimension_count", head_dim) / head_dim,
        "rope_theta": data.number("rope.freq_base", DEFAULT_THETA),
        "rope_scaling": read_scaling(data),
    }


def _dtype(file: GgufFile) -> str:
    """Returns float32 if all of it is, else bfloat16: for what is dequantized, and for float16 too, which few CPUs multiply."""
    return "float32" if all(tensor.type.name == "F32" for tensor in file.tensors.values()) else "bfloat16"


_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def _generation_defaults(file: GgufFile) -> Config:
    return {name: file.get(key) for key, name in _SAMPLING.items() if file.get(key) is not None}
