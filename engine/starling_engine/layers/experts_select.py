"""Chooses how the experts of each layer are stored and multiplied."""

import functools
import logging

import torch

from starling_engine import native
from starling_engine.layers.experts import ExpertsMethod, ExpertsSelector, ExpertsShape
from starling_engine.layers.experts_dense import DenseExperts
from starling_engine.layers.experts_packed import NativeExperts
from starling_engine.platforms.triton_support import triton_runs, why_not_triton

logger = logging.getLogger("starling.layers")


def select_experts_method(dtype: torch.dtype, device: torch.device) -> ExpertsSelector:
    """Returns the selector for a model of `dtype` on `device`. Logs the choice for each shape once, with the reason."""

    @functools.cache
    def choose(shape: ExpertsShape) -> type[ExpertsMethod]:
        method, reason = _choose(shape, dtype, device)
        logger.info("experts: %s (%s)", method.name, reason)
        return method

    def select(shape: ExpertsShape) -> ExpertsMethod:
        return choose(shape)()

    return select


def _choose(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> tuple[type[ExpertsMethod], str]:
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
