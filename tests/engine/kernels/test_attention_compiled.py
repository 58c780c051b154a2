"""What Triton and ptxas make of the attention kernels for an H200: our only look at their speed without one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.kernels.compiled import MAX_SHARED, Compiled, compiled

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("default")]

REGISTERS = 1 << 16
"""Of an SM, for the threads of all its blocks."""

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


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        (launch_attention, {"tokens": 4096, "sequences": 2, "longest": 4000, "dim": 256, "window": 1024}),
        (launch_attention, {"tokens": 64, "sequences": 64, "longest": 1, "cache": FP8}),
        (
            launch_attention,
            {"tokens": 64, "sequences": 64, "longest": 1, "dim": 80, "dtype": FP16, "block_size": 32, "soft_cap": 5.0},
        ),
        (launch_cascade, {}),
    ],
    ids=["mixed, heads of 256 in a window", "decode, fp8", "decode, heads of 80, capped", "cascade"],
)
def test_fits_on_the_device(launch: Callable[..., None], options: dict[str, Any]) -> None:
    """Shared memory, and registers: up to two that are spilled outside the loop's matrices do not matter."""
    for kernel in compiled(launch, **options):
        assert kernel.shared <= MAX_SHARED and kernel.stack <= 8, kernel.name


def test_prefill_runs_on_the_tensor_cores_of_whole_warpgroups_two_blocks_at_a_time() -> None:
    (prefill,) = compiled(launch_attention, 8192, 1, 8192)
    assert prefill.stack == 0
    assert 2 * prefill.shared <= MAX_SHARED and 2 * 256 * prefill.registers <= REGISTERS
    assert "wgmma.mma_async" in prefill.ptx
    assert _copied(prefill) == {4, 16}, "page numbers are of 4 bytes, pages are read in 16"


def test_decode_reads_the_cache_sixteen_bytes_at_a_time_three_blocks_at_a_time() -> None:
    decode, merge = compiled(launch_attention, 64, 64, 1)
    assert decode.stack == merge.stack == 0
    assert 3 * decode.shared <= MAX_SHARED and 3 * 128 * decode.registers <= REGISTERS
    assert _copied(decode) == {4, 16}


def test_the_store_moves_sixteen_bytes_at_a_time() -> None:
    (store,) = compiled(launch_store)
    assert store.stack == 0
    assert "ld.global.v4" in store.ptx and "st.global.v4" in store.ptx


def _copied(kernel: Compiled) -> set[int]:
    """Bytes of each asynchronous copy to shared memory."""
    return {int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.[^;]*?\], (0x\w+)", kernel.ptx)}
