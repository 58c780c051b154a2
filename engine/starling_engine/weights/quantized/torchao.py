"""TorchAO's checkpoints: tensors of its classes, kept in parts. What each is, the headers of safetensors files tell.

A matrix `module.weight` has parts `module._weight_qdata`, `module._weight_scale` and so on. As a source, they are the tensors that
other tools write: `module.weight`, `module.weight_scale`, `module.weight_zero_point`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import QuantizationConfig, WeightScheme
from starling_engine.native.group_quantized import Format, GroupQuantized
from starling_engine.weights.quantized.matrix import CodedMatrix, Endings, Read, nibbles
from starling_engine.weights.safetensors_source import SafetensorsWeights
from starling_engine.weights.source import Index, TensorInfo, TensorReader

QDATA4 = "weight_qdata"
"""Ending of the codes of an `Int4Matrix`."""
_PART = re.compile(r"(?P<module>.+)\._weight_(?P<part>\w+)")
_ENDINGS = {"qdata": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point"}
_PLAIN = "Tensor"


class TorchAoWeights:
    """A checkpoint's tensors under names that others use, and `config`, which is what the headers tell of each matrix.

    Raises WeightError naming a tensor of a class that cannot be read, or whose description is damaged.
    """

    def __init__(self, files: SafetensorsWeights) -> None:
        self._files = files
        schemes, fours = _schemes(files)
        self._names = {_renamed(name, fours): name for name in files.tensors}
        self.config = QuantizationConfig("torchao", exact=schemes)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: self._files.tensors[stored] for name, stored in self._names.items()}

    @contextmanager
    def open(self, file: Path) -> Iterator[TensorReader]:
        """See `WeightFiles`."""
        with self._files.open(file) as opened:
            yield _Reader(opened, self._names)


class _Reader:
    def __init__(self, reader: TensorReader, names: Mapping[str, str]) -> None:
        self._reader = reader
        self._names = names

    def read(self, name: str, index: Index) -> Tensor:
        return self._reader.read(self._names[name], index)


class Int4Matrix(CodedMatrix):
    """Int4Tensor: codes from -8 to 7, two in a byte, times a scale, plus a number.

    weight_qdata [N, K / 2] int8; weight_scale, weight_zero_point [G, N], and the zero point is what code 0 stands for.
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        n, half = self._shape_of(QDATA4, 2)
        groups = self._shape_of("weight_scale", 2)[0]
        for ending in ("weight_scale", "weight_zero_point"):
            self._check(ending, (groups, n))
        self._describe("4 bits of TorchAO", (n, 2 * half), 4, 2 * groups)
        self._group = self._group_of("weight_scale", groups)
        if self._group % 16 == 0:
            self.form = Format(4, self._group, minima=True)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        signed = nibbles(read(QDATA4, (rows,)).contiguous().view(torch.uint8))
        scales = read("weight_scale", (slice(None), rows)).T.float()
        zeros = read("weight_zero_point", (slice(None), rows)).T.float()
        form = Format(4, self._group, minima=True)
        return GroupQuantized(signed ^ 8, scales.contiguous(), form, (zeros - 8 * scales).contiguous())


def _renamed(name: str, fours: set[str]) -> str:
    match = _PART.fullmatch(name)
    if match is None:
        return name
    module, part = match["module"], match["part"]
    if part == "qdata" and module in fours:
        return f"{module}.{QDATA4}"
    return f"{module}.{_ENDINGS.get(part, f'weight_{part}')}"


def _schemes(files: SafetensorsWeights) -> tuple[dict[str, WeightScheme], set[str]]:
    """Returns the scheme of each quantized module, and the modules that are of Int4Tensor."""
    described = {
        name.removesuffix(".weight"): _described(name, text) for name, text in files.metadata.items() if name.endswith(".weight")
    }
    kinds = {module: each for module, each in described.items() if each[0] != _PLAIN}
    for module, (kind, _) in kinds.items():
        if kind not in _KINDS:
            what = f"checkpoint: {module}.weight is of TorchAO's {kind}, which is not supported"
            raise WeightError(f"{what}; supported: {', '.join(_KINDS)}")
        if absent := [part for part in ("qdata", "scale") if f"{module}._weight_{part}" not in files.tensors]:
            raise WeightError(f"checkpoint: {module}._weight_{absent[0]} is missing")
        if f"{module}._weight_act_pre_scale" in files.tensors:
            what = f"checkpoint: {module}.weight has act_pre_scale (activations that are scaled first)"
            raise WeightError(f"{what}, which is not supported")
    fours = {module for module, (kind, _) in kinds.items() if kind == "Int4Tensor"}
    shifted = fours | _shifted(files, kinds.keys() - fours)
    return {module: _scheme(module, kind, data, module not in shifted) for module, (kind, data) in kinds.items()}, fours


def _described(name: str, text: str) -> tuple[str, Mapping[str, object]]:
    """Reads what a header says of a tensor: the class, and its attributes."""
    try:
        found = json.loads(text)
        kind, data = found["_type"], found.get("_data", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightError(f"checkpoint: the header's description of {name} cannot be read") from error
    if not isinstance(kind, str) or not isinstance(data, Mapping):
        raise WeightError(f"checkpoint: the header's description of {name} cannot be read")
    return kind, data


def _scheme(module: str, kind: str, data: Mapping[str, object], symmetric: bool) -> WeightScheme:
    name = f"{module}.weight"
    if kind == "Float8Tensor":
        return WeightScheme(8, block=_block(name, data))
    bits = {"Int4Tensor": 4, "Int8Tensor": 8}.get(kind)
    return WeightScheme(_bits(name, data) if bits is None else bits, symmetric=symmetric)


_KINDS = ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


def _shifted(files: SafetensorsWeights, modules: Iterable[str]) -> set[str]:
    """Returns the modules whose zero points are not all zero: symmetric tensors have some, too."""
    by_file: dict[Path, list[str]] = {}
    for module in modules:
        info = files.tensors.get(f"{module}._weight_zero_point")
        if info is not None:
            by_file.setdefault(info.file, []).append(module)
    found: set[str] = set()
    for path, here in by_file.items():
        with files.open(path) as file:
            found.update(each for each in here if bool(file.read(f"{each}._weight_zero_point", ()).float().any()))
    return found


def _bits(name: str, data: Mapping[str, object]) -> int:
    target = data.get("target_dtype")
    dtype = target.get("_data") if isinstance(target, Mapping) else None
    match = re.fullmatch(r"int([2-8])", str(dtype))
    if match is None:
        raise WeightError(f"checkpoint: {name} has target_dtype {dtype}, which is not supported; supported: int2 to int8")
    return int(match[1])


def _block(name: str, data: Mapping[str, object]) -> tuple[int, int] | None:
    """Returns rows and columns that share a scale; None where rows have scales of their own, or all share one."""
    block = data.get("block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(each, int) and each > 0 for each in block):
        raise WeightError(f"checkpoint: {name} has block_size {block}, which is not two integers above 0")
    return (block[0], block[1]) if block[0] > 1 else None
