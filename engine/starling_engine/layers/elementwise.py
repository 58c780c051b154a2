"""Chooses the kernels of element-wise layers, and of sums and multiples, once for each layer, when it is built."""

import functools
import logging
from typing import Literal, Protocol

import torch

from starling_engine import native
from starling_engine.model_config.layer import Temperature
from starling_engine.native import elementwise_ops, encoder_ops, reference
from starling_engine.platforms.triton_support import why_not_triton

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

Kernels = Literal["triton", "native", "torch"]


class Arithmetic(Protocol):
    """A module of sums and multiples. `native.reference` defines what they compute."""

    def add(self, to: torch.Tensor, x: torch.Tensor, by: float = 1.0) -> torch.Tensor: ...

    def multiply(self, x: torch.Tensor, by: float) -> torch.Tensor: ...

    def multiple(self, x: torch.Tensor, by: float) -> torch.Tensor: ...

    def multiply_rows(
        self,
        x: torch.Tensor,
        by: torch.Tensor,
        at: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        sigmoid: bool = False,
    ) -> torch.Tensor: ...

    def temper(self, x: torch.Tensor, positions: torch.Tensor, temperature: Temperature) -> torch.Tensor: ...

    def finish_logits(self, logits: torch.Tensor, divisor: float, cap: float) -> torch.Tensor: ...


logger = logging.getLogger("starling.layers")


def elementwise_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Returns the first of these that serves the dtype and device on this machine."""
    candidates: tuple[tuple[Kernels, str | None], ...] = (
        ("triton", _why_not_triton(dtype, device)),
        ("native", _why_not_native(dtype, device)),
    )
    refused: list[str] = []
    for name, why_not in candidates:
        if why_not is None:
            _log(name, "; ".join(refused) or "the fastest here")
            return name
        refused.append(f"not {name}: {why_not}")
    _log("torch", "; ".join(refused))
    return "torch"


def arithmetic(dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """Returns the kernels where torch's threads have no part in a step, else torch's own operations."""
    return elementwise_ops if encoder_ops.are_fastest(dtype, device) else reference


def _why_not_triton(dtype: torch.dtype, device: torch.device) -> str | None:
    return why_not_triton(device) or (None if dtype in TRITON_DTYPES else f"its kernels have no {dtype}")


def _why_not_native(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"its kernels run on a CPU, not on {device.type}"
    if dtype not in NATIVE_DTYPES:
        return f"its kernels have no {dtype}"
    return None if native.load() is not None else "the native kernels are not available on this machine"


@functools.cache
def _log(chosen: str, reason: str) -> None:
    """Logs once, and not for each layer."""
    logger.info("norms and gates: %s (%s)", chosen, reason)
