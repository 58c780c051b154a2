"""The attention kernels as Triton and ptxas compile them for an H200: our only look at their speed without one."""

import re

import pytest
import torch
from starling_engine.native.cache_rows import INT4, INT8, cached

from tests.engine.kernels.compiled import IN_FLIGHT, MAX_SHARED, REGISTERS, Compiled, compiled

pytestmark = pytest.mark.timeout(120)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def empty_cache(dtype: torch.dtype, dim: int) -> torch.Tensor:
    row = cached(torch.empty(dim), dtype, 1.0).shape[-1]
    return empty(1 << 14, 2, 8, 16, row, dtype=dtype)


def launch_attention(tokens: int, sequences: int, longest: int, cache: torch.dtype = BF16, dim: int = 128) -> None:
    """Makes a step of the shape of Llama 3 8B, with contexts of up to 8,192 tokens."""
    from starling_engine.kernels.attention_plan import QueryBlocks
    from starling_engine.kernels.paged_attention import paged_attention

    q, kv = empty(tokens, 32, dim, dtype=BF16), empty_cache(cache, dim)
    blocks = empty(QueryBlocks.of(dim, 2, 4).most(tokens, sequences), 2)
    arguments = q, kv, empty(sequences, 512), empty(sequences + 1), empty(sequences), 0.1
    paged_attention(*arguments, max_query_len=longest, query_blocks=blocks)


def launch_decode(rows: int, cache: torch.dtype = BF16, dim: int = 128) -> None:
    """Makes a decode in one launch, with head norms, rotation and store; contexts of up to 8,192 tokens."""
    from starling_engine.kernels.paged_attention import AttentionCall, RawHeads, attend, most_arrived

    raw = RawHeads(
        qkv=empty(rows, 48 * dim, dtype=BF16),
        positions=empty(rows, dtype=torch.int64),
        slot_mapping=empty(rows, dtype=torch.int64),
        cos_sin=empty(8192, dim, dtype=torch.float32),
        q_norm=empty(dim, dtype=BF16),
        k_norm=empty(dim, dtype=BF16),
        eps=1e-6,
    )
    call = AttentionCall(
        q=raw.queries(dim, 8),
        kv=empty_cache(cache, dim),
        block_tables=empty(rows, 512),
        query_start=empty(rows + 1),
        context_lens=empty(rows),
        scale=0.1,
        raw=raw,
        arrived=empty(most_arrived(raw.qkv.device)),
    )
    attend(call, 1)


def launch_cascade() -> None:
    from starling_engine.kernels.paged_attention import AttentionCall, cascade_attention

    call = AttentionCall(
        q=empty(64, 32, 128, dtype=BF16),
        kv=empty(1 << 14, 2, 8, 16, 128, dtype=BF16),
        block_tables=empty(64, 512),
        query_start=empty(65),
        context_lens=empty(64),
        scale=0.1,
        sinks=empty(32, dtype=torch.float32),
    )
    cascade_attention(call, 4096, 1)


def launch_store(cache: torch.dtype = BF16, dim: int = 128) -> None:
    from starling_engine.kernels.store import qk_norm_rope_store

    norms = [empty(dim, dtype=BF16), empty(dim, dtype=BF16)]
    positions, slots = empty(64, dtype=torch.int64), empty(64, dtype=torch.int64)
    cos_sin, kv = empty(4096, dim, dtype=torch.float32), empty_cache(cache, dim)
    qk_norm_rope_store(empty(64, 48 * dim, dtype=BF16), positions, cos_sin, *norms, 1e-6, kv, slots)


def test_all_parts_of_a_cascade_fit_on_the_device() -> None:
    for kernel in compiled(launch_cascade):
        assert kernel.shared <= MAX_SHARED and kernel.stack == 0, kernel.name


def test_kernels_of_an_fp8_cache_fit_on_the_device_two_blocks_at_a_time(triton: str | None) -> None:
    """A cache of half the bytes: what is read at once is 8 bytes at least, where it is not page numbers."""
    decode, _ = compiled(launch_attention, 32, 32, 1, cache=FP8)
    (prefill,) = compiled(launch_attention, 8192, 1, 8192, cache=FP8)
    (store,) = compiled(launch_store, cache=FP8)
    assert decode.stack == store.stack == 0
    assert prefill.stack <= (32 if triton == "3.9.0" else 16), "two words, by Triton 3.6, and eight by 3.9"
    assert decode.in_flight >= IN_FLIGHT
    for kernel, threads in ((decode, 128), (prefill, 256)):
        assert 2 * kernel.shared <= MAX_SHARED and 2 * threads * kernel.registers <= REGISTERS
        assert _copied(kernel) - {4} <= {8, 16}
    assert "wgmma.mma_async" in prefill.ptx
    assert "ld.global.v4" in store.ptx
    assert "max.NaN.f32" in store.ptx and "min.NaN.f32" in store.ptx, "what is not a number must not become one"


@pytest.mark.parametrize("cache", [pytest.param(INT8, marks=pytest.mark.whole), INT4])
def test_kernels_of_a_cache_of_codes_fit_on_the_device_two_blocks_at_a_time(cache: torch.dtype, triton: str | None) -> None:
    """Rows of codes are no multiple of 16 bytes in int8, and their parts are read in 8."""
    decode, _ = compiled(launch_attention, 32, 32, 1, cache=cache)
    (prefill,) = compiled(launch_attention, 8192, 1, 8192, cache=cache)
    (store,) = compiled(launch_store, cache=cache)
    assert decode.stack == store.stack == 0
    assert prefill.stack <= (40 if triton == "3.9.0" else 16), "a few words, by Triton 3.9 ten"
    assert _asked_for(decode, cache) >= IN_FLIGHT
    for kernel, threads in ((decode, 128), (prefill, 256)):
        assert 2 * kernel.shared <= MAX_SHARED and 2 * threads * kernel.registers <= REGISTERS
        assert _copied(kernel) == {4, 8 if cache == INT8 else 16}
    assert "wgmma.mma_async" in prefill.ptx
    assert "max.NaN.f32" in store.ptx and "min.NaN.f32" in store.ptx, "what is not a number must not become one"


def test_prefill_runs_on_the_tensor_cores_of_whole_warpgroups_two_blocks_at_a_time(triton: str | None) -> None:
    (prefill,) = compiled(launch_attention, 8192, 1, 8192)
    assert prefill.stack <= (32 if triton == "3.9.0" else 0), "eight words"
    assert 2 * prefill.shared <= MAX_SHARED and 2 * 256 * prefill.registers <= REGISTERS
    assert prefill.products == {"HGMMA"} and prefill.spills == (prefill.stack > 0)
    assert _copied(prefill) == {4, 16}, "page numbers are of 4 bytes, pages are read in 16"


def test_decode_reads_the_cache_sixteen_bytes_at_a_time_three_blocks_at_a_time() -> None:
    decode, merge = compiled(launch_attention, 32, 32, 1)
    assert merge.stack == 0 and not decode.spills
    assert decode.blocks == 3 and decode.in_flight >= IN_FLIGHT
    assert decode.products == {"HMMA"} and decode.instructions["LDGSTS.E.BYPASS.128"] > 8
    assert _copied(decode) == {4, 16}


@pytest.mark.parametrize("cache", [BF16, pytest.param(FP8, marks=pytest.mark.whole), pytest.param(INT4, marks=pytest.mark.whole)])
def test_a_split_decode_is_one_launch_three_blocks_at_a_time(cache: torch.dtype) -> None:
    """What a block has written is there for all when one of its threads counts, and what that thread sees is there for all."""
    (decode,) = compiled(launch_decode, 1, cache)
    assert decode.stack == 0 and not decode.spills and _asked_for(decode, cache) >= IN_FLIGHT
    assert decode.blocks == (2 if cache == FP8 else 3) and decode.products == {"HMMA"}
    written, counted, merged = re.split(r"(atom\.global\.gpu\.acq_rel\.add\.[su]32)", decode.ptx)
    assert counted and re.search(r"st\.global(?!.*cp\.async).*bar\.sync", written[written.rindex("cp.async") :], re.DOTALL)
    assert not re.search(r"[ls][td]\.global", written[written.rindex("bar.sync") :])
    assert merged.index("bar.sync") < merged.index("ld.global")


def test_a_decode_that_fills_the_device_is_not_split_and_fits_three_blocks_at_a_time() -> None:
    (decode,) = compiled(launch_attention, 64, 64, 1)
    assert decode.stack <= 8, "two words"
    assert 3 * decode.shared <= MAX_SHARED and 3 * 128 * decode.registers <= REGISTERS
    assert _copied(decode) == {4, 16}


def test_a_decode_beside_a_prompt_is_split_too() -> None:
    """Unsplit, the longest context is read by one block for each key-value head, while the others of the device wait."""
    prompt, decode, merge = compiled(launch_attention, 1024 + 1, 2, 1024)
    assert prompt.shared < decode.shared and decode.stack == merge.stack == 0
    assert 3 * decode.shared <= MAX_SHARED and 3 * 128 * decode.registers <= REGISTERS
    assert len(compiled(launch_attention, 1024 + 63, 64, 1024)) == 2, "so many fill the device"


@pytest.mark.parametrize("sequences", [1, 32])
def test_decode_with_drafts_is_split_and_fits_two_blocks_at_a_time(sequences: int) -> None:
    decode, *merge = compiled(launch_attention, 8 * sequences, sequences, 8)
    assert decode.stack == 0 and all(kernel.stack == 0 for kernel in merge)
    assert 2 * decode.shared <= MAX_SHARED and 2 * 128 * decode.registers <= REGISTERS
    assert _copied(decode) == {4, 16}
    assert len(merge) == 1


def test_the_store_moves_sixteen_bytes_at_a_time() -> None:
    (store,) = compiled(launch_store)
    assert store.stack == 0
    assert "ld.global.v4" in store.ptx and "st.global.v4" in store.ptx


def _copied(kernel: Compiled) -> set[int]:
    """Bytes of each asynchronous copy to shared memory."""
    return {int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.[^;]*?\], (0x\w+)", kernel.ptx)}


def _asked_for(decode: Compiled, cache: torch.dtype) -> int:
    """Returns the bytes of the cache that an SM has asked for at once, at least.

    In int4 each byte is copied twice, once for each of its codes. In int8 half of the codes go to registers a tile ahead.
    """
    if cache == INT4:
        return decode.in_flight // 2
    of_a_tile = decode.ptx.count("ld.global.v2.b32") // 3 if cache == INT8 else 0  # two before the loop, and one in it
    return decode.in_flight + decode.blocks * decode.threads * 8 * of_a_tile


def launch_store_of_wide_heads() -> None:
    """Gemma 4's layers that see all tokens: a quarter of each head is rotated."""
    from starling_engine.kernels.store import qk_norm_rope_store

    norms = [empty(512, dtype=torch.float32), empty(512, dtype=torch.float32)]
    positions, slots = empty(64, dtype=torch.int64), empty(64, dtype=torch.int64)
    cos_sin, kv = empty(4096, 128, dtype=torch.float32), empty_cache(BF16, 512)
    qk_norm_rope_store(empty(64, 48 * 512, dtype=BF16), positions, cos_sin, *norms, 1e-6, kv, slots)


@pytest.mark.whole  # a minute
def test_kernels_of_heads_of_512_fit_on_the_device(triton: str | None) -> None:
    decode, _ = compiled(launch_attention, 32, 32, 1, dim=512)
    (prefill,) = compiled(launch_attention, 8192, 1, 8192, dim=512)
    (store,) = compiled(launch_store_of_wide_heads)
    assert decode.stack == store.stack == 0 and decode.blocks == 2 and decode.in_flight >= IN_FLIGHT
    assert prefill.shared <= MAX_SHARED and prefill.stack <= (160 if triton == "3.9.0" else 96), "24 words, by Triton 3.9 forty"
    assert prefill.products == {"HGMMA"}
