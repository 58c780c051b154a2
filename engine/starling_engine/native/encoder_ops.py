"""The native kernels of encoders on torch tensors: layer normalisation, which some decoders have, and attention in both directions.

Tensors are on the CPU. Callers guarantee shapes, types and contiguity, so these are asserted.
"""

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from starling_engine import native
from starling_engine.native.bindings import library
from starling_engine.native.build import instruction_set_name

FLOATS = (torch.float32, torch.bfloat16)


def are_fastest(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether these kernels are there, and faster than torch's: in bf16, and in float32 with AVX2 alone.

    With AVX-512 encoders in float32 are multiplied by oneDNN, and its threads and those of our kernels would wait for each other.
    """
    if device.type != "cpu" or dtype not in FLOATS or native.load() is None:
        return False
    return dtype == torch.bfloat16 or instruction_set_name() == "avx2"


def layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    """Normalises x [T, K] in fp32 into out, which may be x. With a residual [T, K]: residual += x, and that is normalised.

    weight and bias [K] have the type of x, fp32 or bf16.
    """
    tokens, k = x.shape
    for each in (x, residual, weight, bias, out):
        assert each is None or (each.dtype == x.dtype and each.shape[-1] == k and each.is_contiguous())
    assert x.dtype in FLOATS
    library().starling_layer_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        eps,
        out.data_ptr(),
        tokens,
        k,
        x.dtype == torch.float32,
        torch.get_num_threads(),
    )


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], seen: Sequence[int], scale: float, window: int = 0
) -> Tensor:
    """q [T, H, D], k and v [T, KVH, D] -> [T, H, D]: each sequence attends to its first `seen` tokens, in fp32.

    Tokens may be strided; D is a multiple of 16. Sequence s is tokens [starts[s], starts[s + 1]). With a `window` tokens see those
    that are fewer than so many away.
    """
    tokens, heads, dim = q.shape
    for each in (q, k, v):
        assert each.dtype == q.dtype and each.stride(2) == 1 and each.stride(1) == dim
    assert q.dtype in FLOATS and dim % 16 == 0 and len(starts) == len(seen) + 1
    out = torch.empty(tokens, heads, dim, dtype=q.dtype)
    library().starling_bidirectional_attention(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        heads,
        k.shape[1],
        dim,
        (c_int64 * len(starts))(*starts),
        (c_int64 * len(seen))(*seen),
        len(seen),
        window,
        scale,
        out.data_ptr(),
        q.dtype == torch.float32,
        torch.get_num_threads(),
    )
    return out
