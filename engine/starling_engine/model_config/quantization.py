"""Reads how a checkpoint has quantized its weights: `quantization_config` of a config.json. Imports no torch.

The tensors of a module tell how its numbers lie. The config tells what they do not: bits, zero points, blocks.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.gguf.reader import SUFFIX
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.module_pattern import compile_pattern
from starling_engine.model_config.stored_names import stored_names

CONFIG = "config.json"
FIELD = "quantization_config"
_SECTIONS = (FIELD, "compression_config")
"""Fields that say it; the first one that is there counts."""


Rounding = Literal["", "token", "group", "static"]
"""Ways in which activations become float8_e4m3fn: not at all; by a scale for each token, or for each ROUNDED_GROUP columns of one;
or by one scale, which the checkpoint has. The others come of the numbers."""
ROUNDED_GROUP = 128
"""Columns of DeepSeek's groups of activations; kernels have no others."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Numbers of a module's weights.

    bits        of a number
    group       columns of a row that share a scale; None: all, or as many as there are scales for
    symmetric   0 is the code in the middle; else there are zero points
    zero_shift  what has to be added to a stored zero point: 1 in GPTQ's first version
    ordered     columns of a group may lie anywhere in a row (GPTQ's desc_act, actorder "group" of compressed-tensors)
    block       rows and columns that share a scale, where both are more than one
    rounding    how rows of x are rounded before they are multiplied by FP8
    """

    bits: int
    group: int | None = None
    symmetric: bool = True
    zero_shift: int = 0
    ordered: bool = False
    block: tuple[int, int] | None = None
    rounding: Rounding = ""


_LONGEST_NAME = 200
"""No model has a longer one; patterns may take long for such."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Schemes by a module's name: one of `exact`, the first of `patterns` that fits its beginning, or the default.

    method  as `quant_method` of transformers
    """

    method: str
    default: WeightScheme | None = None
    exact: Mapping[str, WeightScheme] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], WeightScheme], ...] = ()

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Returns the scheme of a module with quantized weights; None where nothing names it."""
        if module in self.exact:
            return self.exact[module]
        if len(module) > _LONGEST_NAME:
            return self.default
        return next((scheme for pattern, scheme in self.patterns if pattern.match(module)), self.default)


def read_config_json(folder: Path) -> Fields:
    """Reads a model's config.json. Raises ModelError.

    Older checkpoints of ModelOpt say in a file of its own how they are quantized: that becomes part of the config. The
    part of bitsandbytes is left out where no tensor is of its kind: adapters that were merged leave it behind.
    """
    if not (folder / CONFIG).exists():
        names = ", ".join(sorted(path.name for path in folder.glob(f"*{SUFFIX}"))[:5])
        hint = f"its GGUF files are models: name one of {names}" if names else "a GGUF file is named itself (org/name:file.gguf)"
        raise ModelError(f"{folder} holds no {CONFIG}: not a model folder; {hint}")
    config, beside = Fields.read(folder / CONFIG), folder / "hf_quant_config.json"
    if config.get(FIELD) or not beside.exists():
        is_stale = _section(config).get("quant_method") == "bitsandbytes" and _has_no_codes_of_bitsandbytes(folder)
        return Fields({**config.values, **dict.fromkeys(_SECTIONS)}, config.source) if is_stale else config
    found = Fields.read(beside).child("quantization")
    return Fields({**config.values, FIELD: dict(found.values)}, f"{config.source} and {beside.name}")


def _has_no_codes_of_bitsandbytes(folder: Path) -> bool:
    names = stored_names(folder)
    return bool(names) and not any(name.endswith((".SCB", ".absmax")) for name in names)


def read_quantization(config: Fields) -> QuantizationConfig | None:
    """Returns how weights are quantized; None where they are not.

    llm-compressor and ModelOpt write a quantization_config also where they have only measured scales of a cache: that is None.
    Raises UnsupportedModel naming a method, or a part of one, that cannot be read.
    """
    fields = _section(config)
    if not fields.names():
        return None
    of_modelopt = fields.has("quant_algo") or fields.has(_CACHE_ALGORITHM)
    method = fields.text("quant_method", "modelopt" if of_modelopt else "")
    if method not in _METHODS:
        raise UnsupportedModel(
            f"{fields.source}: quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}. "
            "Or take another checkpoint of the model"
        )
    if rotation := next((each for each in _ROTATIONS if fields.get(each)), None):
        raise UnsupportedModel(f"{fields.source}: {rotation} (rotations at run time) is not supported")
    return _METHODS[method](fields)


def has_fp8_cache_scales(config: Fields) -> bool:
    """Says if scales of keys and values, where the checkpoint has some, are of fp8. ModelOpt writes such of other types, too."""
    fields = _section(config)
    scheme = fields.child("kv_cache_scheme")
    is_fp8 = (scheme.get("type") or "float", scheme.get("num_bits") or 8) == ("float", 8)
    return is_fp8 and fields.text(_CACHE_ALGORITHM, "FP8").upper() == "FP8"


def _section(config: Fields) -> Fields:
    """Returns what a config says of quantization; empty where it says nothing."""
    return config.child(next((each for each in _SECTIONS if config.get(each)), FIELD))


_CACHE_ALGORITHM = "kv_cache_quant_algo"

_ROTATIONS = ("rotation", "rotation_config", "spinquant_config", "transform_config")
"""Names that GPTQModel, AutoRound and compressed-tensors have for rotations of activations while the model runs."""


def _pattern(fields: Fields, name: str, pattern: str) -> re.Pattern[str]:
    """Raises ModelError where it is no regular expression."""
    try:
        return compile_pattern(pattern)
    except ValueError as error:
        raise fields.error(name, f"must hold regular expressions ({pattern[:100]!r}: {error})") from error


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


_GPTQ_BITS = (2, 3, 4, 8)
_UNQUANTIZED_BITS = 16


def _group(fields: Fields, name: str) -> int | None:
    """Reads a group's columns; -1 is the whole row."""
    return None if fields.get(name) == -1 else fields.integer(name, 128)


def _changed(scheme: WeightScheme, changes: Fields, module: str) -> WeightScheme | None:
    """Returns the scheme of a module that has bits, a group, zero points or an order of its own; None where it is not quantized."""
    own = changes.child(module)
    bits = _bits(own, "bits", (*_GPTQ_BITS, _UNQUANTIZED_BITS)) if own.has("bits") else scheme.bits
    if bits == _UNQUANTIZED_BITS:
        return None
    group = _group(own, "group_size") if own.has("group_size") else scheme.group
    symmetric, ordered = own.boolean("sym", scheme.symmetric), own.boolean("desc_act", scheme.ordered)
    return replace(scheme, bits=bits, group=group, symmetric=symmetric, ordered=ordered)


def _gptq(fields: Fields) -> QuantizationConfig:
    kind = _refuse_other(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    default = WeightScheme(
        _bits(fields, "bits", _GPTQ_BITS),
        _group(fields, "group_size"),
        fields.boolean("sym", True),
        zero_shift=int(kind == "gptq"),
        ordered=fields.boolean("desc_act", False),
    )
    patterns = []
    dynamic = fields.child("dynamic")
    for name in dynamic.names():
        # What begins with "-:" is not quantized, and has no tensors that ask for a scheme.
        scheme = None if name.startswith("-:") else _changed(default, dynamic, name)
        if scheme is not None:
            patterns.append((_pattern(fields, "dynamic", name.removeprefix("+:")), scheme))
    return QuantizationConfig("gptq", default, patterns=tuple(patterns))


def _awq(fields: Fields) -> QuantizationConfig:
    _refuse_other(fields, "version", ("gemm",), "gemm")
    _bits(fields, "w_bit" if fields.has("w_bit") else "bits", (4,))
    group = _group(fields, "q_group_size" if fields.has("q_group_size") else "group_size")
    return QuantizationConfig("awq", WeightScheme(4, group, symmetric=False))


def _auto_round(fields: Fields) -> QuantizationConfig:
    packing = fields.text("packing_format", "auto_round:auto_gptq")
    possible = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round")
    if packing not in possible:
        raise UnsupportedModel(f"{fields.source}: packing_format {packing!r} is not supported; supported: {', '.join(possible)}")
    if fields.text("data_type", "int") != "int" or fields.integer("act_bits", 16) < 16:
        what = f"{fields.text('data_type', 'int')} with activations of {fields.integer('act_bits', 16)} bits"
        raise UnsupportedModel(f"{fields.source}: {what} is not supported; supported: int with activations of 16 bits")
    awq, shift = packing == "auto_round:auto_awq", int(packing == "auto_round:auto_gptq")
    bits = _bits(fields, "bits", (4,) if awq else _GPTQ_BITS)
    symmetric = not awq and fields.boolean("sym", True)
    if not symmetric and not awq and not fields.has("packing_format"):
        raise UnsupportedModel(f"{fields.source}: packing_format is missing, which tells what zero points mean (sym is false)")
    default = WeightScheme(bits, _group(fields, "group_size"), symmetric, shift)
    exact, patterns = {}, []
    extra = fields.child("extra_config")
    for name in extra.names():
        scheme = _changed(default, extra, name)
        if scheme is None:
            continue
        if re.fullmatch(r"[\w.]+", name):
            exact[name] = scheme
        else:
            patterns.append((_pattern(fields, "extra_config", name), scheme))
    return QuantizationConfig("auto-round", default, exact, tuple(patterns))


def _fp8(fields: Fields) -> QuantizationConfig:
    _refuse_other(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = fields.integers("weight_block_size")
    if block and (len(block) != 2 or 0 in block):
        raise fields.error("weight_block_size", "must be two integers above 0")
    if not block:
        kind = _refuse_other(fields, "activation_scheme", ("dynamic", "static"), "dynamic")
        return QuantizationConfig("fp8", WeightScheme(8, rounding="static" if kind == "static" else "token"))
    return QuantizationConfig("fp8", WeightScheme(8, block=(block[0], block[1]), rounding=_by_groups(block[1])))


def _bitsandbytes(fields: Fields) -> QuantizationConfig:
    return QuantizationConfig("bitsandbytes", WeightScheme(4 if fields.boolean("load_in_4bit", False) else 8))


def _modelopt(fields: Fields) -> QuantizationConfig | None:
    if not fields.has("quant_algo"):
        return None
    kind = _refuse_other(fields, "quant_algo", ("fp8", "nvfp4"), "")
    return QuantizationConfig("modelopt", WeightScheme(8, rounding="static") if kind == "fp8" else WeightScheme(4))


def _compressed_tensors(fields: Fields) -> QuantizationConfig | None:
    _refuse_cache(fields)
    sparsity = fields.child("sparsity_config")
    if sparsity.text("format", "dense") != "dense":
        raise UnsupportedModel(
            f"{sparsity.source}: format {sparsity.get('format')!r} (sparse weights) is not supported; "
            "take a checkpoint that is quantized alone, or a dense one"
        )
    _refuse_other(fields, "format", _CT_FORMATS, "dense")
    groups = fields.child("config_groups")
    exact, patterns, embeddings, default = {}, [], [], None
    for name in groups.names():
        group = groups.child(name)
        if not group.has("weights"):
            continue
        scheme = _group_scheme(group)
        for target in group.texts("targets"):
            # A target without a dot is a class: Linear, one of those of experts, or Embedding.
            if target.startswith("re:"):
                patterns.append((_pattern(group, "targets", target.removeprefix("re:")), scheme))
            elif "." in target or target == "lm_head":
                exact[target] = scheme
            elif target == "Embedding":
                embeddings.append((_EMBEDDINGS, scheme))
            elif default is None or target == "Linear":
                default = scheme
    if default is None and not exact and not patterns and not embeddings:
        return None
    return QuantizationConfig("compressed-tensors", default, exact, (*patterns, *embeddings))


_EMBEDDINGS = re.compile(r".*\b(word_)?embed(?!_out)")
"""Names of modules of the class Embedding; GPT-NeoX's embed_out is its head."""


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
_CT_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


def _group_scheme(group: Fields) -> WeightScheme:
    if group.has("format"):
        _refuse_other(group, "format", _CT_FORMATS, "dense")
    weights = group.child("weights")
    kind = _refuse_other(weights, "type", ("int", "float"), "int")
    bits = _bits(weights, "num_bits", (2, 3, 4, 5, 6, 7, 8) if kind == "int" else (4, 8))
    symmetric = weights.boolean("symmetric", True)
    rounding = _rounding(group.child("input_activations")) if (kind, bits) == ("float", 8) else ""
    if kind == "float" and not symmetric:
        raise UnsupportedModel(f"{weights.source}: symmetric false is not supported for floats")
    strategy = _refuse_other(weights, "strategy", _CT_STRATEGIES, "channel")
    if strategy == "block":
        # Older tools write a text: "128x128".
        written = weights.get("block_structure")
        is_text = isinstance(written, str) and re.fullmatch("[0-9]{1,6}x[0-9]{1,6}", written)
        block = tuple(map(int, written.split("x"))) if is_text else weights.integers("block_structure")
        if len(block) != 2 or 0 in block:
            raise weights.error("block_structure", "must be two integers above 0")
        return WeightScheme(bits, block=(block[0], block[1]), rounding=rounding)
    columns = weights.integer("group_size") if strategy in ("group", "tensor_group") else None
    return WeightScheme(bits, columns, symmetric, ordered=weights.get("actorder") in ("group", "dynamic"), rounding=rounding)


def _rounding(inputs: Fields) -> Rounding:
    """Reads how activations are rounded to FP8. A scale that comes of all tokens of a step would be another one in each step."""
    if (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        return ""
    strategy = inputs.get("strategy")
    if not inputs.get("dynamic"):
        return "static" if strategy == "tensor" else ""
    return _by_groups(inputs.get("group_size")) if strategy == "group" else "token" if strategy in ("token", "tensor") else ""


def _by_groups(columns: object) -> Rounding:
    return "group" if columns == ROUNDED_GROUP else ""


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
    "mxfp4": lambda _: QuantizationConfig("mxfp4", WeightScheme(4, 32)),
    "torchao": lambda _: QuantizationConfig("torchao"),  # headers of the files tell the rest
}
