"""Chooses how the experts of each layer are stored and multiplied."""

import functools
import logging
from collections.abc import Mapping

import torch

from starling_engine import native
from starling_engine.errors import ConfigError
from starling_engine.kernels.fp8 import rounds
from starling_engine.layers.experts import ExpertNames, ExpertsMethod, ExpertsSelector, ExpertsShape, Projection
from starling_engine.layers.experts_dense import DenseExperts
from starling_engine.layers.experts_packed import NativeExperts
from starling_engine.layers.experts_quantized import QuantizedExperts
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.layers.linear_select import NOTHING_STORED
from starling_engine.layers.quantized_kernels import quantized_kernels
from starling_engine.native.group_quantized import Format
from starling_engine.platforms.triton_support import capability, triton_runs, why_not_triton

logger = logging.getLogger("starling.layers")

_PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")


def select_experts_method(
    dtype: torch.dtype, device: torch.device, quantization: str | None = None, stored: Mapping[str, Format] = NOTHING_STORED
) -> ExpertsSelector:
    """Returns the selector for a model of `dtype` on `device`. Logs the choice for each shape once, with the reason.

    Arguments and errors as in `select_linear_method`, which checks the device.
    """

    @functools.cache
    def choose(shape: ExpertsShape) -> type[ExpertsMethod]:
        method, reason = _choose(shape, dtype, device)
        logger.info("experts: %s (%s)", method.name, reason)
        return method

    def select(shape: ExpertsShape, names: ExpertNames) -> ExpertsMethod:
        if not shape.gated:
            if quantization is not None:
                raise ConfigError(f"{quantization} is not possible for experts without a gate; leave it out", "quantization")
            return choose(shape)()
        if quantization is not None:
            return _quantized(dtype, device, *_online(quantization, shape), online=True, prefix=names.prefix)
        can_multiply_codes = stored and quantized_kernels(dtype, device) is not None
        if can_multiply_codes and (forms := _stored_formats(shape, names, stored)) is not None:
            return _quantized(dtype, device, *forms, online=False, prefix=names.prefix)
        return choose(shape)()

    return select


def _quantized(
    dtype: torch.dtype, device: torch.device, gate_up: Format, down: Format, *, online: bool, prefix: str
) -> ExpertsMethod:
    if triton_runs(device):
        from starling_engine.layers.experts_triton import TritonQuantizedExperts, TritonScaledExperts

        if all(rounds(form, dtype, capability(device)) for form in (gate_up, down)):
            return TritonScaledExperts(gate_up, down, online=online, prefix=prefix)
        return TritonQuantizedExperts(gate_up, down, online=online, prefix=prefix)
    return QuantizedExperts(gate_up, down, online=online, prefix=prefix)


def _online(name: str, shape: ExpertsShape) -> tuple[Format, Format]:
    gate_up = ONLINE[name].cut(0, shape.hidden_size)
    down = ONLINE[name].cut(shape.intermediate.start, shape.intermediate_size)
    if gate_up is None or down is None:
        what = f"experts ({shape.intermediate_size} x {shape.hidden_size} on a rank)"
        raise ConfigError(
            f"{name} is not possible for {what}: it wants rows and columns in multiples of {ONLINE[name].block}", "quantization"
        )
    return gate_up, down


def _stored_formats(shape: ExpertsShape, names: ExpertNames, stored: Mapping[str, Format]) -> tuple[Format, Format] | None:
    """Returns the formats of gate and up, and of down, where kernels can multiply the codes of all experts of the layer."""
    found = {
        projection: {stored.get(names.weight(expert, projection)) for expert in range(shape.num_experts)}
        for projection in _PROJECTIONS
    }
    gate_up, downs = found["gate"] | found["up"], found["down"]
    if gate_up == {None} and downs == {None}:
        return None
    share = shape.intermediate
    if len(gate_up) == len(downs) == 1:
        (gate,), (down,) = gate_up, downs
        gate, down = gate and gate.cut(0, shape.hidden_size), down and down.cut(share.start, share.size)
        if gate and down:
            return gate, down
    logger.warning(
        "dequantized, since their forms or a rank's columns do not suit the kernels: experts %s (%d x %d)",
        *(names.prefix, share.size, shape.hidden_size),
    )
    return None


def _choose(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> tuple[type[ExpertsMethod], str]:
    if not shape.gated and triton_runs(device):
        return DenseExperts, "grouped kernels have no experts without a gate"
    if triton_runs(device):
        from starling_engine.layers.experts_triton import TritonExperts

        return TritonExperts, "grouped kernels"
    if device.type != "cpu":
        return DenseExperts, str(why_not_triton(device))
    if dtype != torch.bfloat16:
        return DenseExperts, f"{dtype}: only bfloat16 has a grouped kernel on a CPU"
    if native.load() is None:
        return DenseExperts, "no native kernels here"
    # The kernel multiplies pairs of columns, and eight gates at a time.
    if shape.hidden_size % 2 or shape.intermediate_size % 8:
        sizes = f"{shape.hidden_size} and {shape.intermediate_size}"
        return DenseExperts, f"sizes of {sizes}: the grouped kernel needs multiples of 2 and 8"
    return NativeExperts, "bfloat16 and native kernels"
