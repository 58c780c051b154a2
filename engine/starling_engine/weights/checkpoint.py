"""Opens the files of a checkpoint, whatever their format."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path

from starling_engine.errors import WeightError
from starling_engine.gguf.reader import is_gguf, stamp_of
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.quantization import CONFIG, QuantizationConfig, read_config_json, read_quantization
from starling_engine.model_config.registry import definition_of
from starling_engine.native.group_quantized import Format
from starling_engine.weights.gguf_source import GgufWeights
from starling_engine.weights.pickle_source import PickledWeights
from starling_engine.weights.quantized.source import QuantizedWeights
from starling_engine.weights.quantized.torchao import TorchAoWeights
from starling_engine.weights.safetensors_source import SafetensorsWeights
from starling_engine.weights.source import TensorInfo, WeightFiles


def open_checkpoint(path: Path, *, pickles: bool = False) -> WeightFiles:
    """Reads the headers of the model at `path`, a folder or a GGUF file. Raises WeightError, or ModelError, for what is damaged.

    `pickles`: the folder's pytorch_model.bin files, and no safetensors.
    """
    if is_gguf(path):
        if pickles:
            raise WeightError(f"{path} is a GGUF file, not a folder with pytorch_model.bin; leave --load-format out")
        return GgufWeights(path)
    quantization = _quantization(path)
    if pickles:
        files = PickledWeights(path)
        return files if quantization is None else QuantizedWeights(files, quantization)
    return SafetensorsWeights(path) if quantization is None else _read_once(path, *_stamps(path))


def stored_formats(path: Path, *, pickles: bool = False) -> dict[str, Format]:
    """Returns how codes are read, by the names of the matrices that are quantized in the files."""
    if not is_gguf(path) and _quantization(path) is None:
        return {}
    return {name: info.form for name, info in open_checkpoint(path, pickles=pickles).tensors.items() if info.form is not None}


def check_counts(path: Path, model: ModelConfig, *, pickles: bool = False) -> None:
    """Raises WeightError where the checkpoint has fewer layers than its config says, or other numbers of experts.

    A config that lies would else have thousands of them built before one is missed.
    """
    tensors, names = open_checkpoint(path, pickles=pickles).tensors, definition_of(model.architecture).names
    prefix, _, suffix = f"{names.layer}.".partition("{}")
    found = {name.removeprefix(prefix).partition(suffix)[0] for name in tensors if name.startswith(prefix)}
    missing = next((layer for layer in range(model.num_layers) if str(layer) not in found), None)
    if missing is not None:
        where = f"{prefix}{missing}"
        raise WeightError(f"checkpoint: no tensor is of layer {missing} ({where}), but its config says {model.num_layers} layers")
    if model.moe is not None:
        _check_experts(tensors, names, model.moe)


def _check_experts(tensors: Mapping[str, TensorInfo], names: TensorNames, moe: MoeConfig) -> None:
    """Looks at routers, which have a row for each expert, however experts lie in the files."""
    for layer, router in product(moe.layers, {names.router, names.fused_router}):
        info = tensors.get(name := f"{names.layer.format(layer)}.{router}.weight")
        if info is not None and info.shape[:1] != (moe.num_experts,):
            raise WeightError(
                f"checkpoint: {name} {list(info.shape)} has no {moe.num_experts} rows, as many as its config has experts"
            )


@lru_cache(maxsize=1)
def _read_once(folder: Path, *_stamps: tuple[int, ...]) -> QuantizedWeights:
    """Reads the headers of a quantized checkpoint: seconds for experts with four tensors each, and asked for several times."""
    quantization = _quantization(folder)
    assert quantization is not None, "read a moment ago"
    files = SafetensorsWeights(folder)
    if quantization.method == "torchao":
        named = TorchAoWeights(files)
        return QuantizedWeights(named, named.config)
    return QuantizedWeights(files, quantization)


def _stamps(folder: Path) -> list[tuple[int, ...]]:
    """Returns what changes when one of the folder's files does."""
    return [stamp_of(path.stat()) for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json")]


def _quantization(folder: Path) -> QuantizationConfig | None:
    return read_quantization(read_config_json(folder)) if (folder / CONFIG).exists() else None
