"""Opens the files of a checkpoint, whatever their format."""

from functools import lru_cache
from pathlib import Path

from starling_engine.errors import WeightError
from starling_engine.gguf.reader import is_gguf, stamp_of
from starling_engine.model_config.quantization import CONFIG, QuantizationConfig, read_config_json, read_quantization
from starling_engine.native.group_quantized import Format
from starling_engine.weights.gguf_source import GgufWeights
from starling_engine.weights.pickle_source import PickledWeights
from starling_engine.weights.quantized.source import QuantizedWeights
from starling_engine.weights.quantized.torchao import TorchAoWeights
from starling_engine.weights.safetensors_source import SafetensorsWeights
from starling_engine.weights.source import WeightFiles


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
