"""The config of a model in a GGUF file: its metadata under the names of a config.json and a generation_config.json."""

import math
import struct
from collections.abc import Callable
from typing import Any, Literal

from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.gguf.reader import GgufFile
from starling_engine.gguf.vocabulary import end_token_ids

DEFAULT_THETA = 10000.0
ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192
"""The band of Llama 3.1's scaling, which the file has only as the factors that follow from it."""

_POOLING: dict[Any, Literal["mean", "cls", "last"]] = {1: "mean", 2: "cls", 3: "last"}
"""Numbers of llama.cpp, which has some for other kinds of models besides."""

Config = dict[str, Any]


def read_config(file: GgufFile) -> tuple[Config, Config]:
    """Returns the fields of a config.json and of a generation_config.json.

    Raises UnsupportedModel for an architecture that cannot be read from GGUF, ModelError for metadata that is missing.
    """
    if file.architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedModel(f"{file.path}: general.architecture {file.architecture!r} is not supported; supported: {known}")
    if file.get("split.count") not in (None, 0, 1):
        raise UnsupportedModel(f"{file.path}: a model in several files is not supported; merge them (llama-gguf-split --merge)")
    config = _ARCHITECTURES[file.architecture](_Keys(file))
    return config, {"eos_token_id": end_token_ids(file), **_generation_defaults(file)}


def read_pooling(file: GgufFile) -> Literal["mean", "cls", "last"] | None:
    """Returns how hidden states become a vector, if the file says so: mean, cls or last."""
    return _POOLING.get(file.get(f"{file.architecture}.pooling_type"))


class _Keys:
    """The metadata of the file's architecture: names without its prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        value = self.file.get(f"{self.file.architecture}.{name}")
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> Any:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.file.path}: {self.file.architecture}.{name} must be a number above 0, got {value!r}")
        return value


def _common(keys: _Keys, architecture: str) -> Config:
    file, heads = keys.file, keys.number("attention.head_count")
    config = {
        "architectures": [architecture],
        "hidden_size": keys.number("embedding_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "intermediate_size": keys.number("feed_forward_length"),
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", DEFAULT_THETA),
        "vocab_size": file.count_of("tokenizer.ggml.tokens") or keys.get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "dtype": _dtype(file),
        "rope_scaling": _rope_scaling(keys),
    }
    width = keys.number("rope.dimension_count", keys.get("attention.key_length", config["hidden_size"] / heads))
    config["head_dim"] = keys.number("attention.key_length", width)
    if keys.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel(f"{file.path}: attention.value_length: heads of keys and values have to be equally wide")
    # Any but 1 is refused with the other fields.
    return config | {"partial_rotary_factor": width / config["head_dim"]}


def _dtype(file: GgufFile) -> str:
    """Returns float32 if all of it is, else bfloat16: for what is dequantized, and for float16 too, which few CPUs multiply."""
    return "float32" if all(tensor.type.name == "F32" for tensor in file.tensors.values()) else "bfloat16"


def _rope_scaling(keys: _Keys) -> Config | None:
    if ROPE_FACTORS in keys.file.tensors:
        return _llama3_scaling(keys)
    # Older files have another name; a factor without a type is linear, as in llama.cpp.
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0))
    kind = keys.get("rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none")
    if kind == "none":
        return None
    for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        if keys.get(f"rope.scaling.{name}", 1.0) not in (1.0, -1.0, 0.0):
            raise UnsupportedModel(f"{keys.file.path}: rope.scaling.{name} is not supported; supported: 1")
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{keys.file.path}: rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    scaling: Config = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {name: keys.get(f"rope.scaling.yarn_{name}", 0.0) for name in ("beta_fast", "beta_slow")}
        scaling["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(keys: _Keys) -> Config:
    """Finds the factor of Llama 3.1's scaling. Raises UnsupportedModel where the file's factors are others."""
    file = keys.file
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ModelError(f"{file.path}: {ROPE_FACTORS} is {tensor.type.name} {list(tensor.shape)}; expected one row of F32")
    factors = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor))
    factor, theta = max(factors), keys.number("rope.freq_base", DEFAULT_THETA)
    if not all(1 <= each < math.inf for each in factors):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} must be numbers of at least 1")
    expected = [_llama3_factor(2 * math.pi * theta ** (index / len(factors)), factor) for index in range(len(factors))]
    if any(abs(found - wanted) > 1e-3 * wanted for found, wanted in zip(factors, expected, strict=True)):
        raise UnsupportedModel(f"{file.path}: {ROPE_FACTORS} are not those of Llama 3.1's scaling; no others are supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }


def _llama3_factor(wavelength: float, factor: float) -> float:
    """Returns by what a frequency is divided (transformers' `_compute_llama3_parameters`)."""
    position = (_LLAMA3_LENGTH / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = min(1.0, max(0.0, position))
    return 1 / ((1 - smooth) / factor + smooth)


def _llama(keys: _Keys) -> Config:
    if keys.get("expert_count", 0):
        config = _common(keys, "MixtralForCausalLM")
        return config | {
            "num_local_experts": keys.number("expert_count"),
            "num_experts_per_tok": keys.number("expert_used_count"),
        }
    config = _common(keys, "LlamaForCausalLM")
    if (window := keys.get("attention.sliding_window")) is not None:
        return config | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    tensors = keys.file.tensors
    return config | {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _qwen2(keys: _Keys) -> Config:
    return _common(keys, "Qwen2ForCausalLM")


def _qwen3(keys: _Keys) -> Config:
    return _common(keys, "Qwen3ForCausalLM") | {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


def _qwen3_moe(keys: _Keys) -> Config:
    return _common(keys, "Qwen3MoeForCausalLM") | {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


_ARCHITECTURES: dict[str, Callable[[_Keys], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
}
"""Architectures, by llama.cpp's names. "llama" is also what Mistral and Mixtral are written as."""

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def _generation_defaults(file: GgufFile) -> Config:
    return {name: file.get(key) for key, name in _SAMPLING.items() if file.get(key) is not None}
