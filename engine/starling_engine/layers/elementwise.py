"""Chooses the kernels of element-wise layers, once for each layer, when it is built."""

import functools
import logging
from typing import Literal

import torch

from starling_engine import native
from starling_engine.platforms.triton_support import why_not_triton

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

Kernels = Literal["triton", "native", "torch"]

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
