"""The native kernels on torch tensors. What each computes is defined by its namesake in `reference`.

Shapes: T tokens, K model width, H query heads, KVH key-value heads, D head dimension, S sequences. Tensors
are on the CPU; shapes, types and contiguity are invariants of the caller, so they are asserted.
"""

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p

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
    "starling_paged_attention": (
        *(c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        *(c_int64, c_int64, c_int64, c_int64, c_float, c_int64, c_float, c_void_p, c_int, c_int),
    ),
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


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of q [T, H, D] over the paged cache -> [T, H, D]; D a multiple of 16, at most 256.

    kv [num_blocks, 2, KVH, block_size, D] has q's type, fp32 or bf16, and holds this step's keys already.
    Sequence s owns q's rows [query_start[s], query_start[s + 1]), the last of its context_lens[s] tokens; all
    the indices are int32, block_tables [S, max_blocks]. With a window, a token sees itself and the window - 1
    before it, and blocks wholly before that are not read. soft_cap bounds the scaled scores, by
    soft_cap * tanh(score / soft_cap).
    """
    _, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = kv.shape
    sequences, max_blocks = block_tables.shape
    assert q.dtype == kv.dtype and q.dtype in (torch.float32, torch.bfloat16)
    assert q.is_contiguous() and kv.is_contiguous() and kv.shape[4] == dim
    assert dim % 16 == 0 and dim <= 256 and heads % kv_heads == 0
    assert block_tables.dtype == query_start.dtype == context_lens.dtype == torch.int32
    assert block_tables.is_contiguous() and query_start.is_contiguous() and context_lens.is_contiguous()
    assert query_start.shape == (sequences + 1,) and context_lens.shape == (sequences,)
    out = torch.empty_like(q)
    _lib().starling_paged_attention(
        *(q.data_ptr(), kv.data_ptr(), block_tables.data_ptr(), max_blocks),
        *(query_start.data_ptr(), context_lens.data_ptr(), sequences),
        *(heads, kv_heads, dim, block_size, scale, window, soft_cap),
        *(out.data_ptr(), q.dtype is torch.float32, torch.get_num_threads()),
    )
    return out
