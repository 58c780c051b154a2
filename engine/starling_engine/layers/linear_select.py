"""Chooses how each matrix is stored and multiplied."""

import logging
from collections.abc import Callable, Mapping

import torch

from starling_engine import native
from starling_engine.errors import ConfigError
from starling_engine.kernels.matmul import has_mkldnn, has_mkldnn_bf16, is_emulated
from starling_engine.layers.linear import LinearMethod, LinearShape, MethodSelector
from starling_engine.layers.linear_dense import DenseLinear, ExactLinear
from starling_engine.layers.linear_packed import MkldnnLinear, NativeExactLinear, NativeFloatLinear, NativeLinear, NativeTable
from starling_engine.layers.linear_quantized import ONLINE, OnlineQuantizedLinear, QuantizedLinear
from starling_engine.layers.quantized_kernels import quantized_kernels
from starling_engine.native import encoder_ops
from starling_engine.native.group_quantized import Format
from starling_engine.platforms.triton_support import why_not_triton

logger = logging.getLogger("starling.layers")

NOTHING_STORED: Mapping[str, Format] = {}


def select_linear_method(
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    stored: Mapping[str, Format] = NOTHING_STORED,
    *,
    causal: bool = True,
) -> MethodSelector:
    """Returns the selector for a model of `dtype` on `device`. Logs the choice and its reason once.

    A `causal` model in float32 has the same numbers for a token whatever the rows beside it, as far as torch's product does: who
    resumes a stream, or compares two revisions, computes in one step what another has in many.

    `stored` are the formats of a checkpoint's quantized matrices, by the names of tensors. Where they cannot be multiplied as they
    are, their numbers are.

    Raises ConfigError where `quantization` is not possible; so does the selector for a matrix that cannot be quantized.
    """
    method, reason = _choose(dtype, device, causal)
    logger.info("linear layers: %s (%s)", method.name, reason)

    def select_plain(shape: LinearShape) -> LinearMethod:
        if shape.only_lookup:
            return NativeTable() if method is NativeLinear else DenseLinear()
        if shape.exact:
            return NativeExactLinear() if method is NativeLinear else ExactLinear()
        return method() if _FITS[method](shape) else DenseLinear()

    if quantization is not None:
        return _select_quantized(quantization, dtype, device, select_plain)
    return _select_stored(stored, dtype, device, select_plain) if stored else select_plain


def _select_stored(
    stored: Mapping[str, Format], dtype: torch.dtype, device: torch.device, otherwise: MethodSelector
) -> MethodSelector:
    kernels = quantized_kernels(dtype, device)
    if kernels is None:
        logger.warning("quantized weights are dequantized: %s", _why_no_kernels(dtype, device))
        return otherwise
    logger.info("quantized matrices are multiplied as they are")

    def select(shape: LinearShape) -> LinearMethod:
        fused = stored.get(f"{shape.fused}.weight")
        fusible = shape.stored_names[: shape.num_fused or None]
        found = (stored.get(f"{name}.weight", fused if name in fusible else None) for name in shape.stored_names)
        forms = [form for form in found if form is not None]
        if shape.exact or not forms:
            return otherwise(shape)
        if len(forms) < len(shape.names):
            logger.warning("dequantized, since not all of a layer's matrices are quantized: %s", ", ".join(shape.names))
            return otherwise(shape)
        cut = [part for form in forms if (part := form.cut(shape.ins.start, shape.in_size)) is not None]
        if len(cut) < len(forms):
            logger.warning("dequantized, since a rank's columns are no whole groups: %s", ", ".join(shape.names))
            return otherwise(shape)
        return QuantizedLinear(cut, kernels)

    return select


def _select_quantized(name: str, dtype: torch.dtype, device: torch.device, otherwise: MethodSelector) -> MethodSelector:
    kernels = quantized_kernels(dtype, device)
    if kernels is None:
        raise ConfigError(f"{name} is not possible: {_why_no_kernels(dtype, device)}", "quantization")
    logger.info("linear layers: %s (quantized while they are loaded)", name)

    def select(shape: LinearShape) -> LinearMethod:
        if shape.exact or shape.only_lookup:
            return otherwise(shape)
        form = ONLINE[name].cut(shape.ins.start, shape.in_size)
        gates = kernels.gates and shape.gated
        if form is None or (gates and shape.out_size % 16):
            size = f"{shape.out_size} x {shape.in_size}"
            wanted = f"columns in multiples of {ONLINE[name].block}" + (" and 16 rows" if gates else "")
            what = f"{', '.join(shape.names)} ({size} on a rank)"
            raise ConfigError(f"{name} is not possible for {what}: it wants {wanted}", "quantization")
        return OnlineQuantizedLinear(name, form, kernels)

    return select


def _why_no_kernels(dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cpu":
        return str(why_not_triton(device))
    if dtype != torch.bfloat16:
        return f"kernels for it are of bfloat16 on a CPU; this is {dtype}"
    return "there are no native kernels here; the log says why"


def _choose(dtype: torch.dtype, device: torch.device, causal: bool) -> tuple[type[LinearMethod], str]:
    if dtype == torch.float32 and not causal and encoder_ops.are_fastest(dtype, device):
        return NativeFloatLinear, "an encoder in float32 on a CPU with AVX2 alone"
    if device.type == "cpu" and dtype == torch.float32 and has_mkldnn() and not causal:
        return MkldnnLinear, "an encoder in float32 on a CPU"
    if device.type != "cpu" or dtype != torch.bfloat16:
        computed = ", computed in float32" if is_emulated(dtype, device.type) else ""
        return DenseLinear, f"{dtype} on {device.type}{computed}: only bfloat16, and encoders, have packed weights on a CPU"
    if native.load() is not None:
        return NativeLinear, "bfloat16 and native kernels"
    if has_mkldnn_bf16():
        return MkldnnLinear, "no native kernels here"
    return DenseLinear, "computed in float32: neither native kernels nor oneDNN's bfloat16 work here"


_FITS: dict[type[LinearMethod], Callable[[LinearShape], bool]] = {
    # The kernel multiplies pairs of columns, and eight gates at a time.
    NativeLinear: lambda shape: shape.in_size % 2 == 0 and not (shape.gated and shape.out_size % 16),
    # A tied head is also the embedding: a second copy for it would cost more than the slower product.
    NativeFloatLinear: lambda shape: not shape.lookup,
    MkldnnLinear: lambda shape: not shape.lookup,
    DenseLinear: lambda _shape: True,
}
"""Says for each method which matrices it can hold. The others are dense."""
