"""The native kernels on torch tensors. What each computes is defined by its namesake in `reference`.

Shapes: T tokens, K model width, H query heads, KVH key-value heads, D head dimension, S sequences. Tensors
are on the CPU; shapes, types and contiguity are invariants of the caller, so they are asserted.
"""

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from starling_engine.native.build import load
from starling_engine.native.packed import BLOCK_COLUMNS, PackedWeight

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "starling_pack_linear": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "starling_linear": (
        *(c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64),
        *(c_void_p, c_void_p, c_int, c_int),
    ),
    "starling_embedding_packed": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int),
}


@functools.cache
def _lib() -> ctypes.CDLL:
    """The loaded library with its signatures set. Raises RuntimeError where there is none (see `load`)."""
    lib = load()
    if lib is None:
        raise RuntimeError("no native CPU kernels here; use starling_engine.native.reference")
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, None
    return lib


def pack_linear(weight: Tensor) -> PackedWeight:
    """Packs a linear layer's weight [N, K] bf16 (K even) for `linear` and `embedding_packed`."""
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] % 2 == 0
    n, k = weight.shape
    data = torch.empty(-(-n // BLOCK_COLUMNS), k // 2, BLOCK_COLUMNS, 2, dtype=torch.bfloat16)
    _lib().starling_pack_linear(weight.data_ptr(), n, k, data.data_ptr(), torch.get_num_threads())
    return PackedWeight(data, n, k)


def linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x [M, K] bf16 (rows may be strided) times the weight, plus bias [N] bf16 -> [M, N] bf16 or fp32."""
    m, k = x.shape
    assert x.dtype == torch.bfloat16 and k == packed.k and x.stride(1) == 1
    assert bias is None or (
        bias.dtype == torch.bfloat16 and bias.shape == (packed.n,) and bias.is_contiguous()
    )
    assert out_dtype in (torch.bfloat16, torch.float32)
    out = torch.empty(m, packed.n, dtype=out_dtype)
    _lib().starling_linear(
        *(x.data_ptr(), x.stride(0), m, packed.data.data_ptr(), packed.n, k),
        *(None if bias is None else bias.data_ptr(), out.data_ptr()),
        *(out_dtype is torch.float32, torch.get_num_threads()),
    )
    return out


def embedding_packed(ids: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Rows ids [T] int64 of the weight -> out [T, K] bf16. So tied embeddings need no second copy."""
    assert ids.dtype == torch.int64 and ids.is_contiguous()
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == (ids.shape[0], packed.k)
    _lib().starling_embedding_packed(
        ids.data_ptr(),
        ids.shape[0],
        packed.data.data_ptr(),
        packed.k,
        out.data_ptr(),
        torch.get_num_threads(),
    )
