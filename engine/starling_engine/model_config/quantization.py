"""Reads how a checkpoint has quantized its weights: `quantization_config` of a config.json. Imports no torch.

The tensors of a module tell how its numbers lie. The config tells what they do not: bits, zero points, blocks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields

CONFIG = "config.json"
FIELD = "quantization_config"


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Numbers of a module's weights.

    bits        of a number; 16 where the module is not quantized
    symmetric   0 is the code in the middle; else there are zero points
    zero_shift  what has to be added to a stored zero point: 1 in GPTQ's first version
    block       rows and columns that share a scale, where both are more than one
    """

    bits: int
    symmetric: bool = True
    zero_shift: int = 0
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Schemes by rules: the first whose pattern fits a module's name counts.

    method  as `quant_method` of transformers
    rules   pairs of a pattern (exact name, or a regular expression behind "re:") and a scheme
    """

    method: str
    rules: tuple[tuple[str, WeightScheme], ...]
    default: WeightScheme | None = None

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Returns the scheme of a module with quantized weights; None where no rule knows it."""
        return next((scheme for pattern, scheme in self.rules if _fits(pattern, module)), self.default)


def read_config_json(folder: Path) -> Fields:
    """Reads a model's config.json. Raises ModelError.

    Older checkpoints of ModelOpt say in a file of its own how they are quantized: that becomes part of the config.
    """
    config, beside = Fields.read(folder / CONFIG), folder / "hf_quant_config.json"
    if config.has(FIELD) or not beside.exists():
        return config
    return config.with_value(FIELD, dict(Fields.read(beside).child("quantization").values))


def read_quantization(config: Fields) -> QuantizationConfig | None:
    """Returns how weights are quantized; None where they are not.

    llm-compressor writes a quantization_config also where it has only measured scales of a cache in fp8: that is None.
    Raises UnsupportedModel naming a method, or a part of one, that cannot be read.
    """
    if not config.has(FIELD):
        return None
    fields = config.child(FIELD)
    method = fields.text("quant_method", "modelopt" if fields.has("quant_algo") else "")
    if method not in _METHODS:
        raise UnsupportedModel(
            f"{fields.source}: quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}. "
            "Or take another checkpoint of the model"
        )
    return _METHODS[method](fields)


def _fits(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


def _pattern(fields: Fields, name: str, pattern: str) -> str:
    """Returns a regular expression with its prefix. Raises ModelError where it is none."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise fields.error(name, f"must hold regular expressions ({pattern!r}: {error})") from error
    return f"re:{pattern}"


def _bits(fields: Fields, name: str, possible: tuple[int, ...]) -> int:
    bits = fields.integer(name)
    if bits not in possible:
        raise UnsupportedModel(f"{fields.source}: {name} {bits} is not supported; supported: {', '.join(map(str, possible))}")
    return bits


def _refuse_other(fields: Fields, name: str, possible: tuple[str, ...], default: str) -> str:
    value = fields.text(name, default).lower()
    if value not in possible:
        raise UnsupportedModel(f"{fields.source}: {name} {value!r} is not supported; supported: {', '.join(possible)}")
    return value


def _changed(scheme: WeightScheme, changes: Fields, module: str) -> WeightScheme:
    """Returns the scheme of a module with bits and zero points of its own."""
    own = changes.child(module)
    return replace(scheme, bits=own.integer("bits", scheme.bits), symmetric=own.boolean("sym", scheme.symmetric))


def _gptq(fields: Fields) -> QuantizationConfig:
    kind = _refuse_other(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = _bits(fields, "bits", (2, 3, 4, 8))
    default = WeightScheme(bits, fields.boolean("sym", True), zero_shift=int(kind == "gptq"))
    rules = []
    dynamic = fields.child("dynamic")
    for pattern in dynamic.names():
        # What begins with "-:" is not quantized, and has no tensors that ask for a scheme.
        scheme = _changed(default, dynamic, pattern)
        rules.append((_pattern(fields, "dynamic", pattern.removeprefix("+:").removeprefix("-:")), scheme))
    return QuantizationConfig("gptq", tuple(rules), default)


def _awq(fields: Fields) -> QuantizationConfig:
    _refuse_other(fields, "version", ("gemm",), "gemm")
    _bits(fields, "bits" if fields.has("bits") else "w_bit", (4,))
    return QuantizationConfig("awq", (), WeightScheme(4, symmetric=False))


def _auto_round(fields: Fields) -> QuantizationConfig:
    packing = fields.text("packing_format", "auto_round:auto_gptq")
    possible = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round")
    if packing not in possible:
        raise UnsupportedModel(f"{fields.source}: packing_format {packing!r} is not supported; supported: {', '.join(possible)}")
    if fields.text("data_type", "int") != "int" or fields.integer("act_bits", 16) < 16:
        what = f"{fields.text('data_type', 'int')} with activations of {fields.integer('act_bits', 16)} bits"
        raise UnsupportedModel(f"{fields.source}: {what} is not supported; supported: int with activations of 16 bits")
    awq = packing == "auto_round:auto_awq"
    bits = _bits(fields, "bits", (4,) if awq else (2, 3, 4, 8))
    symmetric = not awq and fields.boolean("sym", True)
    default = WeightScheme(bits, symmetric, zero_shift=int(packing == "auto_round:auto_gptq"))
    rules = []
    extra = fields.child("extra_config")
    for name in extra.names():
        pattern = name if re.fullmatch(r"[\w.]+", name) else _pattern(fields, "extra_config", name)
        rules.append((pattern, _changed(default, extra, name)))
    return QuantizationConfig("auto-round", tuple(rules), default)


def _fp8(fields: Fields) -> QuantizationConfig:
    _refuse_other(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = fields.integers("weight_block_size")
    if block and (len(block) != 2 or 0 in block):
        raise fields.error("weight_block_size", "must be two integers above 0")
    return QuantizationConfig("fp8", (), WeightScheme(8, block=(block[0], block[1]) if block else None))


def _bitsandbytes(fields: Fields) -> QuantizationConfig:
    return QuantizationConfig("bitsandbytes", (), WeightScheme(4 if fields.boolean("load_in_4bit", False) else 8))


def _modelopt(fields: Fields) -> QuantizationConfig:
    kind = _refuse_other(fields, "quant_algo", ("fp8", "nvfp4"), "")
    return QuantizationConfig("modelopt", (), WeightScheme(8 if kind == "fp8" else 4))


def _compressed_tensors(fields: Fields) -> QuantizationConfig | None:
    _refuse_cache(fields)
    if fields.get("transform_config"):
        raise UnsupportedModel(f"{fields.source}: transform_config (rotations at run time) is not supported")
    sparsity = fields.child("sparsity_config")
    if sparsity.text("format", "dense") != "dense":
        raise UnsupportedModel(
            f"{sparsity.source}: format {sparsity.get('format')!r} (sparse weights) is not supported; "
            "take a checkpoint that is quantized alone, or a dense one"
        )
    groups = fields.child("config_groups")
    if not groups.names():
        return None
    rules, default = [], None
    for name in groups.names():
        group = groups.child(name)
        if not group.has("weights"):
            continue
        scheme = _group_scheme(group)
        for target in group.texts("targets"):
            # A target without a dot is a class, of which Linear alone is quantized.
            if target.startswith("re:"):
                rules.append((_pattern(group, "targets", target.removeprefix("re:")), scheme))
            elif "." in target or target == "lm_head":
                rules.append((target, scheme))
            else:
                default = scheme
    return QuantizationConfig("compressed-tensors", tuple(rules), default)


_CT_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)


def _group_scheme(group: Fields) -> WeightScheme:
    if group.has("format"):
        _refuse_other(group, "format", _CT_FORMATS, "dense")
    weights = group.child("weights")
    kind = _refuse_other(weights, "type", ("int", "float"), "int")
    bits = _bits(weights, "num_bits", (2, 3, 4, 5, 6, 7, 8) if kind == "int" else (4, 8))
    if weights.get("actorder") in ("group", "dynamic"):
        raise UnsupportedModel(
            f"{weights.source}: actorder {weights.get('actorder')!r} is not supported; supported: weight, static"
        )
    symmetric = weights.boolean("symmetric", True)
    if kind == "float" and not symmetric:
        raise UnsupportedModel(f"{weights.source}: symmetric false is not supported for floats")
    block = weights.integers("block_structure")
    if weights.get("strategy") == "block" and (len(block) != 2 or 0 in block):
        raise weights.error("block_structure", "must be two integers above 0")
    return WeightScheme(bits, symmetric, block=(block[0], block[1]) if block else None)


def _refuse_cache(fields: Fields) -> None:
    cache = fields.child("kv_cache_scheme")
    if not cache.names():
        return
    per_tensor = (cache.get("type"), cache.get("num_bits"), cache.get("strategy")) == ("float", 8, "tensor")
    if not per_tensor:
        raise UnsupportedModel(f"{cache.source}: only float, 8 bits, strategy tensor is supported")
    if not cache.boolean("symmetric", True):
        raise UnsupportedModel(f"{cache.source}: symmetric false (zero points) is not supported; supported: true")


_METHODS: dict[str, Callable[[Fields], QuantizationConfig | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}
