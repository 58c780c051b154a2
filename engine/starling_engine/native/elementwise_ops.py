"""The native kernels that go element by element, on torch tensors. The function of the same name in `reference` defines each.

Tensors are on the CPU, fp32 or bf16. Callers guarantee shapes, types and contiguity, so these are asserted.
"""

import torch
from torch import Tensor

from starling_engine.model_config.layer import Temperature
from starling_engine.native.bindings import library

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
"""Names of activations, in the order of their numbers in `kernels/elementwise.cpp`."""


def activate(name: str, x: Tensor) -> Tensor:
    """Takes the activation of x [T, C] in place, and returns it."""
    return _activate(name, x, x, gated=False)


def activate_and_mul(name: str, gate_up: Tensor) -> Tensor:
    """Multiplies the activation of the first half by the second: gate_up [T, 2 I] -> [T, I]."""
    tokens, both = gate_up.shape
    assert both % 2 == 0
    return _activate(name, gate_up, torch.empty(tokens, both // 2, dtype=gate_up.dtype), gated=True)


def _activate(name: str, x: Tensor, out: Tensor, *, gated: bool) -> Tensor:
    assert _is_float(x) and x.is_contiguous()
    library().starling_activate(
        x.data_ptr(),
        out.data_ptr(),
        *out.shape,
        ACTIVATIONS.index(name),
        gated,
        x.dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Takes xIELU of x [T, C] in place, and returns it. Its parameters are one number each, of x's type."""
    parameters = (alpha_p, alpha_n, beta, eps)
    assert _is_float(x) and x.is_contiguous() and all(each.dtype == x.dtype and each.numel() == 1 for each in parameters)
    library().starling_xielu(
        x.data_ptr(),
        x.data_ptr(),
        *x.shape,
        *(each.data_ptr() for each in parameters),
        x.dtype is torch.float32,
        torch.get_num_threads(),
    )
    return x


def add(to: Tensor, x: Tensor, by: float = 1.0) -> Tensor:
    """Adds by * x to `to`, both [T, C] (rows may be strided), in place, and returns it."""
    return _add_multiple(x, by, to, adds=True)


def multiply(x: Tensor, by: float) -> Tensor:
    """Multiplies x [T, C] (rows may be strided) by a number, in place, and returns it."""
    return _add_multiple(x, by, x, adds=False)


def multiple(x: Tensor, by: float) -> Tensor:
    """Returns by * x [T, C] (rows may be strided)."""
    return _add_multiple(x, by, torch.empty(x.shape, dtype=x.dtype), adds=False)


def _add_multiple(x: Tensor, by: float, out: Tensor, *, adds: bool) -> Tensor:
    tokens, width = x.shape
    assert _is_float(x) and x.dtype == out.dtype and x.shape == out.shape and x.stride(1) == out.stride(1) == 1
    library().starling_add_multiple(
        x.data_ptr(),
        x.stride(0),
        by,
        adds,
        out.data_ptr(),
        out.stride(0),
        tokens,
        width,
        x.dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def multiply_rows(x: Tensor, by: Tensor, at: Tensor | None = None, out: Tensor | None = None, *, sigmoid: bool = False) -> Tensor:
    """Multiplies rows of x [T, C] (they may be strided) by numbers, or by their sigmoid, into out, or in place; returns it.

    by [T], or [1] for all rows, is of x's type or fp32. With at [T] int64 a row's number is by[at], and any where that is negative.
    """
    tokens, width = x.shape
    out = x if out is None else out
    assert _is_float(x) and x.dtype == out.dtype and x.shape == out.shape and x.stride(1) == out.stride(1) == 1
    assert by.dtype in (x.dtype, torch.float32) and by.dim() == 1 and (at is not None or len(by) in (1, tokens))
    assert at is None or (at.dtype == torch.int64 and at.shape == (tokens,) and at.is_contiguous())
    library().starling_multiply_rows(
        x.data_ptr(),
        x.stride(0),
        by.data_ptr(),
        0 if len(by) == 1 else by.stride(0),
        None if at is None else at.data_ptr(),
        sigmoid,
        out.data_ptr(),
        out.stride(0),
        tokens,
        width,
        x.dtype is torch.float32,
        by.dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def temper(x: Tensor, positions: Tensor, temperature: Temperature) -> Tensor:
    """Multiplies rows of x [T, C] (they may be strided) by the temperature of their positions [T] int64, in place; returns x."""
    tokens, width = x.shape
    assert _is_float(x) and x.stride(1) == 1 and positions.dtype == torch.int64 and positions.shape == (tokens,)
    library().starling_temper(
        x.data_ptr(),
        x.stride(0),
        positions.data_ptr(),
        temperature.first,
        temperature.step,
        temperature.scale,
        tokens,
        width,
        x.dtype is torch.float32,
        torch.get_num_threads(),
    )
    return x


def finish_logits(logits: Tensor, divisor: float, cap: float) -> Tensor:
    """Divides logits [S, V] fp32, in place, and returns them; with a cap above 0 they are cap * tanh(logit / cap) then."""
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    library().starling_finish_logits(logits.data_ptr(), logits.numel(), divisor, cap, torch.get_num_threads())
    return logits


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.bfloat16)
