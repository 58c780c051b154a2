"""What Triton and ptxas make of the attention kernels for an H200: our only look at their speed without one."""

import pytest
import torch

from tests.engine.kernels.compiled import MAX_SHARED, Compiled, compiled

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("default")]

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_attention(
    tokens: int,
    sequences: int,
    longest: int,
    dim: int = 128,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
    block_size: int = 16,
    heads: int = 32,
    kv_heads: int = 8,
    context: int = 1 << 13,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    from starling_engine.kernels.paged_attention import paged_attention

    paged_attention(
        empty(tokens, heads, dim, dtype=dtype),
        empty(1 << 14, 2, kv_heads, block_size, dim, dtype=cache or dtype),
        empty(sequences, context // block_size),
        empty(sequences + 1),
        empty(sequences),
        dim**-0.5,
        window,
        soft_cap,
        max_query_len=longest,
    )


def launch_cascade() -> None:
    from starling_engine.kernels.cascade import cascade_attention
    from starling_engine.kernels.paged_attention import Call

    call = Call(
        q=empty(64, 32, 128, dtype=BF16),
        kv=empty(1 << 14, 2, 8, 16, 128, dtype=BF16),
        block_tables=empty(64, 512),
        query_start=empty(65),
        context_lens=empty(64),
        scale=0.1,
    )
    cascade_attention(call, 4096, 1)


def launch_store(dim: int = 128, cache: torch.dtype = BF16) -> None:
    from starling_engine.kernels.store import qk_norm_rope_store

    norms = [empty(dim, dtype=BF16), empty(dim, dtype=BF16)]
    positions, slots = empty(64, dtype=torch.int64), empty(64, dtype=torch.int64)
    cos_sin, kv = empty(4096, dim, dtype=FP32), empty(1 << 14, 2, 8, 16, dim, dtype=cache)
    qk_norm_rope_store(empty(64, 48 * dim, dtype=BF16), positions, cos_sin, *norms, 1e-6, kv, slots)


def assert_fits(kernels: list[Compiled]) -> None:
    for kernel in kernels:
        assert kernel.shared <= MAX_SHARED, kernel
        assert kernel.stack == 0, kernel


def test_prefill_runs_on_the_tensor_cores_of_whole_warpgroups() -> None:
    kernels = compiled(launch_attention, 8192, 1, 8192)
    assert_fits(kernels)
    (prefill,) = kernels
    assert "wgmma.mma_async" in prefill.ptx
    assert "cp.async.cg.shared.global" in prefill.ptx


def test_decode_reads_the_cache_sixteen_bytes_at_a_time() -> None:
    kernels = compiled(launch_attention, 64, 64, 1)
    assert_fits(kernels)
    decode, merge = kernels
    assert "cp.async.cg.shared.global" in decode.ptx
    assert "ld.global.v4" in merge.ptx


