"""A checkpoint in which weights are quantized, as a source: one tensor `weight` in place of those that it is kept as."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import QuantizationConfig, WeightScheme
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.weights.quantized.bitsandbytes import STATE, RowsMatrix, TableMatrix
from starling_engine.weights.quantized.floats import EXPONENTS, Float4Expert, Float4Matrix, Float8Expert, Float8Matrix
from starling_engine.weights.quantized.integers import AwqMatrix, GptqMatrix, PackedMatrix, PlainMatrix
from starling_engine.weights.quantized.matrix import CodedMatrix, QuantizedMatrix
from starling_engine.weights.quantized.torchao import QDATA4, Int4Matrix
from starling_engine.weights.source import Index, TensorInfo, TensorReader, WeightFiles

logger = logging.getLogger("starling.weights")

_ENDINGS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_shape", "weight_g_idx"),
    *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"),
    *("SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    QDATA4,
)
"""Endings of the tensors of a quantized matrix. Scales of inputs are not read: activations are rounded as they come, or not."""
_QUANTIZED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "weight.absmax")
"""A module that has one of them is quantized."""
_FLOATS = ("F32", "BF16", "F16")
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Beginnings of the endings of tensors with matrices of all experts of a layer, and the names of these matrices."""
_OF_EXPERTS: Mapping[tuple[str, str], tuple[type[Float4Expert | Float8Expert], Mapping[str, tuple[str, ...]]]] = {
    ("_blocks", "U8"): (Float4Expert, {"_blocks": ("U8",), "_scales": ("U8",)}),
    ("", "F8_E4M3"): (Float8Expert, {"": ("F8_E4M3",), "_scale_inv": _FLOATS, "_activation_scale": _FLOATS}),
}
"""Kinds of such matrices by what follows in the ending of their codes, and the dtype; and their tensors with dtypes."""


class QuantizedWeights:
    """Raises WeightError where the tensors of a quantized matrix do not fit together."""

    def __init__(self, files: WeightFiles, config: QuantizationConfig) -> None:
        self._files = files
        self._matrices: dict[str, QuantizedMatrix] = {}
        self.tensors: dict[str, TensorInfo] = dict(files.tensors)
        with ExitStack() as stack:
            reader = _Reader(files, self._matrices, stack, {})
            for module, parts in _modules(files.tensors).items():
                if any(each in parts for each in _QUANTIZED):
                    self._add(module, parts, config, reader)
        self._add_experts(config)
        numbers = [name for name, matrix in self._matrices.items() if matrix.form is None]
        if numbers:
            shown = f"{numbers[0]} and {len(numbers) - 1} more" if len(numbers) > 1 else numbers[0]
            logger.warning("dequantized, since no kernel takes groups of their size: %s", shown)

    def _add(self, module: str, parts: Mapping[str, TensorInfo], config: QuantizationConfig, reader: TensorReader) -> None:
        scheme = config.scheme_of(module)
        if scheme is None:
            raise WeightError(f"checkpoint: {module} is quantized, but no target of quantization_config names it")
        matrix = _matrix(module, parts, scheme, reader)
        for ending in parts:
            del self.tensors[f"{module}.{ending}"]
        file = next(info.file for ending, info in parts.items() if ending.endswith(("weight", "packed", "qdata")))
        self._put(module, matrix, file)

    def _add_experts(self, config: QuantizationConfig) -> None:
        """Adds each expert's matrices, by the names that checkpoints with a tensor for each have."""
        for name, info in self._files.tensors.items():
            module, _, ending = name.rpartition(".")
            tensor = ending.removesuffix("_blocks")
            found = _OF_EXPERTS.get((ending.removeprefix(tensor), info.dtype))
            if tensor not in _EXPERTS or found is None or (scheme := config.scheme_of(module)) is None:
                continue
            kind, dtypes = found
            parts = {}
            for follows, possible in dtypes.items():
                each = f"{tensor}{follows}"
                if (part := self.tensors.pop(f"{module}.{each}", None)) is None:
                    continue
                if part.dtype not in possible:
                    raise WeightError(f"checkpoint: {module}.{each} is {part.dtype} (expected {', '.join(possible)})")
                parts[each] = part
            for expert in range(info.shape[0] if info.shape else 0):
                for projection in _EXPERTS[tensor]:
                    self._put(f"{module}.{expert}.{projection}", kind(module, parts, scheme, expert, projection), info.file)

    def _put(self, module: str, matrix: QuantizedMatrix, file: Path) -> None:
        self._matrices[f"{module}.weight"] = matrix
        self.tensors[f"{module}.weight"] = TensorInfo(file, matrix.shape, matrix.label, matrix.element_bytes, matrix.form)

    @contextmanager
    def open(self, file: Path) -> Iterator["_Reader"]:
        """See `WeightFiles`. Other files are opened as they are needed: a matrix may lie in two."""
        with ExitStack() as stack:
            opened: dict[Path, TensorReader] = {file: stack.enter_context(self._files.open(file))}
            yield _Reader(self._files, self._matrices, stack, opened)


class _Reader:
    def __init__(
        self, files: WeightFiles, matrices: Mapping[str, QuantizedMatrix], stack: ExitStack, opened: dict[Path, TensorReader]
    ) -> None:
        self._files = files
        self._matrices = matrices
        self._stack = stack
        self._opened = opened

    def read(self, name: str, index: Index) -> Tensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._read(name, index)
        rows, columns = _parts(index)
        return matrix.numbers(self._of(matrix), rows)[:, columns]

    def read_codes(self, name: str, index: Index) -> GroupQuantized:
        matrix = self._matrices[name]
        assert isinstance(matrix, CodedMatrix), "has no codes"
        return matrix.part(self._of(matrix), *_parts(index))

    def _of(self, matrix: QuantizedMatrix) -> Callable[[str, Index], Tensor]:
        return lambda ending, index: self._read(f"{matrix.module}.{ending}", index)

    def _read(self, name: str, index: Index) -> Tensor:
        file = self._files.tensors[name].file
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(self._files.open(file))
        return self._opened[file].read(name, index)


def _matrix(module: str, parts: Mapping[str, TensorInfo], scheme: WeightScheme, reader: TensorReader) -> QuantizedMatrix:
    """Returns the matrix that a module's tensors are; `reader` reads what the headers do not tell."""
    for ending, info in parts.items():
        if info.dtype not in _DTYPES.get(ending, (info.dtype,)):
            wanted = ", ".join(_DTYPES[ending])
            raise WeightError(f"checkpoint: {module}.{ending} is {info.dtype} (expected {wanted})")
    kind: Callable[[str, Mapping[str, TensorInfo], WeightScheme], QuantizedMatrix] | None
    if "qweight" in parts:
        # AWQ packs along rows, GPTQ along columns.
        scales = parts["scales"].shape if "scales" in parts else ()
        kind = GptqMatrix if parts["qweight"].shape[-1:] == scales[-1:] else AwqMatrix
    elif "weight.absmax" in parts:
        return TableMatrix(module, parts, scheme, lambda ending, index: reader.read(f"{module}.{ending}", index))
    else:
        ending = next((each for each in ("weight_packed", QDATA4) if each in parts), "weight")
        kind = _KINDS.get((ending, parts[ending].dtype if ending in parts else ""))
        if kind is PlainMatrix and "SCB" in parts:
            kind = RowsMatrix
        if kind is PlainMatrix and "weight_scale" in parts and parts["weight_scale"].dtype == EXPONENTS:
            kind = Float4Matrix  # of DeepSeek-V4's experts
    if kind is None:
        found = ", ".join(f"{ending} ({info.dtype})" for ending, info in parts.items())
        raise WeightError(f"checkpoint: {module} is quantized in a way that is not known: {found}")
    return kind(module, parts, scheme)


def _parts(index: Index) -> tuple[slice, slice]:
    """Returns rows and columns of a part of a matrix."""
    rows, columns = (*index, slice(None), slice(None))[:2]
    assert isinstance(rows, slice) and isinstance(columns, slice), "a matrix is not taken by single rows"
    return rows, columns


def _modules(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Returns, by module, the tensors that may belong to a quantized matrix, by their endings."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            found.setdefault(match["module"], {})[match["ending"]] = info
    return found


_NAME = re.compile(rf"(?P<module>.+?)\.(?P<ending>{'|'.join(map(re.escape, _ENDINGS))}|{re.escape(STATE)}\w+)")

_DTYPES = {
    **dict.fromkeys(("qweight", "qzeros"), ("I32",)),
    **dict.fromkeys(("scales", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "SCB", "weight.quant_map"), _FLOATS),
    **dict.fromkeys(("weight.nested_absmax", "weight.nested_quant_map"), _FLOATS),
    **dict.fromkeys(("g_idx", "weight_g_idx"), ("I32", "I64")),
    "weight_scale": (*_FLOATS, "F8_E4M3", "U8", EXPONENTS),
    "weight_zero_point": ("I32", "I8", *_FLOATS),
    "weight.absmax": ("F32", "U8"),
}

_KINDS: dict[tuple[str, str], type[QuantizedMatrix]] = {
    ("weight_packed", "I32"): PackedMatrix,
    ("weight_packed", "U8"): Float4Matrix,
    ("weight", "U8"): Float4Matrix,
    ("weight", "I8"): PlainMatrix,
    ("weight", "F8_E4M3"): Float8Matrix,
    (QDATA4, "I8"): Int4Matrix,
    (QDATA4, "U8"): Int4Matrix,
}
"""Kinds of matrices by the tensor of their codes, and its dtype."""
