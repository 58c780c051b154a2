"""Writes a checkpoint in fewer bits, as compressed-tensors, which vLLM and transformers read, too.

Weights are rounded to the nearest code; no text is looked at (no calibration). The file that is being written is in memory, and one
tensor besides.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from starling_engine.errors import ConfigError, UnsupportedModel, WeightError
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.quantization import CONFIG, FIELD
from starling_engine.model_config.registry import definition_of
from starling_engine.native.group_quantized import FP8_LARGEST
from starling_engine.weights.loader import Progress, no_progress
from starling_engine.weights.safetensors_source import INDEX, SINGLE, SafetensorsWeights


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme of compressed-tensors, by its name there: bits of weights (W) and of activations (A).

    group  columns that share a scale; None: a row
    """

    bits: int
    is_float: bool = False
    group: int | None = None
    activation_bits: int | None = None
    format: str = "pack-quantized"

    def config(self) -> dict[str, Any]:
        """Returns the group of a quantization_config."""
        kind = "float" if self.is_float else "int"
        weights = {"num_bits": self.bits, "type": kind, "symmetric": True, "dynamic": False}
        weights |= {"strategy": "channel"} if self.group is None else {"strategy": "group", "group_size": self.group}
        activations = None
        if self.activation_bits is not None:
            activations = {"num_bits": self.activation_bits, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
        return {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}


SCHEMES = {
    "W4A16": Scheme(4, group=128),
    "W8A16": Scheme(8),
    "W8A8": Scheme(8, activation_bits=8, format="int-quantized"),
    "FP8_DYNAMIC": Scheme(8, is_float=True, activation_bits=8, format="float-quantized"),
}


def quantize_checkpoint(source: Path, target: Path, scheme: Scheme, progress: Progress = no_progress) -> int:
    """Writes the checkpoint in the folder `source` to the folder `target`, which is new or empty; returns its weights' bytes.

    Raises ConfigError for a target that is not empty, UnsupportedModel or WeightError for a model that cannot be quantized: it is
    quantized already, has all its experts in one tensor, matrices with a column for each output, or no whole groups of columns.
    """
    if not source.is_dir():
        raise UnsupportedModel(f"{source} is no folder of safetensors; only such a model can be quantized")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty", "out")
    config = load_model_config(source)
    if config.quantization is not None:
        raise UnsupportedModel(f"{source}: the checkpoint is quantized already ({config.quantization.method})")
    if not config.has_lm_head:
        raise UnsupportedModel(f"{source}: the checkpoint has no head for tokens; such a model cannot be quantized")
    names = definition_of(config.architecture).names
    if names.transposed:
        raise UnsupportedModel(f"{source}: matrices of {config.architecture} have a column for each output, and are not quantized")
    files = SafetensorsWeights(source)
    chosen = _chosen(files, names, scheme)
    target.mkdir(parents=True, exist_ok=True)
    written = _write_weights(files, target, chosen, scheme, progress)
    _write_rest(source, target, scheme, _ignored(files, chosen, config))
    return written


def _chosen(files: SafetensorsWeights, names: TensorNames, scheme: Scheme) -> set[str]:
    """Returns the tensors to quantize: matrices of layers that are multiplied with tokens, but routers, `kv_b` and decays."""
    gate_ups = tuple(f".{name}" for name in names.fused_experts[0])
    fused = [name for name in files.tensors if name.endswith(gate_ups)]
    if fused:
        raise UnsupportedModel(f"{fused[0]} holds all experts of a layer, which cannot be quantized; save them one by one")
    is_matrix = _matrices_of(names)
    chosen = {name for name, info in files.tensors.items() if is_matrix(name)}
    if not chosen:
        raise WeightError("the checkpoint has no matrix that could be quantized")
    for name in sorted(chosen):
        shape = files.tensors[name].shape
        if len(shape) != 2 or files.tensors[name].element_bytes is None:
            raise WeightError(f"{name} {list(shape)} ({files.tensors[name].dtype}) is no matrix of numbers")
        if shape[1] % (scheme.group or 8):
            fix = "no groups of" if scheme.group else "no multiple of"
            raise WeightError(f"{name} has {shape[1]} columns, {fix} {scheme.group or 8}")
    return chosen


def _matrices_of(names: TensorNames) -> Callable[[str], bool]:
    attention = (names.q, names.k, names.v, names.fused_qkv, names.o, names.q_a, names.q_b, names.kv_a)
    delta, mamba, mamba2, conv = names.delta, names.mamba, names.mamba2, names.short_conv
    deltas = (delta.qkvz, delta.q, delta.k, delta.v, delta.fused_qkv, delta.z, delta.out)
    mixers = (*attention, *deltas, mamba.inputs, mamba.out, mamba2.inputs, mamba2.out, conv.fused_in, conv.out)
    own = (*filter(None, mixers), names.gate, names.up, names.fused_gate_up, names.down, names.fused_shared)
    of_experts = "|".join(map(re.escape, names.expert_projections))
    modules = [*map(re.escape, own), rf"{re.escape(names.experts)}\.\d+\.({of_experts})"]
    modules += [re.escape(f"{names.shared_experts}.{name}") for name in names.shared_projections]
    layer = re.escape(names.layer).replace(re.escape("{}"), r"\d+")
    pattern = re.compile(rf"{layer}\.({'|'.join(modules)})\.weight")
    return lambda name: pattern.fullmatch(name) is not None


def _ignored(files: SafetensorsWeights, chosen: set[str], config: ModelConfig) -> list[str]:
    """Returns the modules with a matrix that stays as it is; the head is named in any case."""
    embedding = definition_of(config.architecture).names.embedding
    found = {name for name, info in files.tensors.items() if len(info.shape) == 2 and name not in chosen}
    stored = {files.stored_name(name).removesuffix(".weight") for name in found if name != f"{embedding}.weight"}
    return sorted(stored | {"lm_head"})


def _write_weights(files: SafetensorsWeights, target: Path, chosen: set[str], scheme: Scheme, progress: Progress) -> int:
    """Writes a file for each one of the source, and the index; returns the bytes of all tensors."""
    by_file: dict[Path, list[str]] = {}
    for name, info in files.tensors.items():
        by_file.setdefault(info.file, []).append(name)
    done, total = 0, 0
    where: dict[str, str] = {}
    for path, names in by_file.items():
        tensors: dict[str, Tensor] = {}
        with files.open(path) as file:
            for name in names:
                stored, tensor = files.stored_name(name), file.read(name, ())
                tensors |= dict(_quantized(stored, tensor, scheme)) if name in chosen else {stored: tensor.clone()}
                done += 1
                progress(done, len(files.tensors))
        save_file(tensors, target / path.name, metadata={"format": "pt"})
        shutil.copymode(path, target / path.name)  # the library lets nobody else read it
        where |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(by_file) > 1 or next(iter(by_file)).name != SINGLE:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return total


def _quantized(name: str, weight: Tensor, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that stand for one matrix."""
    module, (n, k) = name.removesuffix(".weight"), weight.shape
    group = scheme.group or k
    grouped = weight.float().view(n, k // group, group)
    largest = grouped.abs().amax(2)
    if scheme.is_float:
        scales = _scales(largest / FP8_LARGEST, weight.dtype)
        rounded = (grouped / scales.float()[:, :, None]).clamp(-FP8_LARGEST, FP8_LARGEST).view(n, k)
        yield f"{module}.weight", rounded.to(torch.float8_e4m3fn)
    else:
        middle = 1 << scheme.bits - 1
        scales = _scales(largest / (middle - 0.5), weight.dtype)
        codes = (grouped / scales.float()[:, :, None]).round_().clamp_(-middle, middle - 1).to(torch.int8).view(n, k)
        if scheme.format == "int-quantized":
            yield f"{module}.weight", codes
        else:
            yield f"{module}.weight_packed", _packed(codes.view(torch.uint8) + middle, scheme.bits)
            yield f"{module}.weight_shape", torch.tensor([n, k])
    yield f"{module}.weight_scale", scales


def _scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds scales to the dtype. None is 0, so that a group of zeros has one."""
    return scales.to(dtype).clamp(min=torch.finfo(dtype).tiny)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """[N, K] uint8 -> [N, K bits / 32] int32, the first code in the lowest bits."""
    raw = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return raw.contiguous().view(torch.int32)


def _write_rest(source: Path, target: Path, scheme: Scheme, ignored: list[str]) -> None:
    """Writes the config with what was done, and copies what belongs to the model besides: tokenizer, template, licence."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in (CONFIG, INDEX) and path.suffix in (".json", ".jinja", ".model", ".txt", ".md", ""):
            shutil.copyfile(path, target / path.name)
    for path in sorted(source.glob("[0-9]*_*/config.json")):  # modules of sentence-transformers
        (target / path.parent.name).mkdir()
        shutil.copyfile(path, target / path.parent.name / path.name)
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    before = config.get(FIELD) or {}
    config[FIELD] = {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.config()},
        "ignore": ignored,
        "kv_cache_scheme": before.get("kv_cache_scheme"),
    }
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
