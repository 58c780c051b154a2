"""The kernel before attention against its torch reference."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config.rope import RopeConfig
from starling_engine.native import reference
from starling_engine.native.cache_rows import INT4, INT8, cached, uncached

from tests.engine.slabs import assert_untouched, in_slabs

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
SLOTS = [17, -1, 20, 95, 3]
POSITIONS = [40, 1, 0, 199, 7]


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    block_size: int = 16
    norm: bool = False
    wide: bool = False
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None


CASES = {
    "plain": Case(),
    "head norms": Case(norm=True, head_dim=128, rotary_dim=128, heads=16, kv_heads=8),
    "head norms whose weights are fp32": Case(norm=True, wide=True),
    "head norms, fp32": Case(norm=True, dtype=FP32, block_size=8),
    "partly rotated, fp16": Case(rotary_dim=24, dtype=FP16),
    "partly rotated, head norms": Case(rotary_dim=48, head_dim=80, norm=True, heads=5, kv_heads=1),
    "heads of 96": Case(head_dim=96, rotary_dim=96, block_size=32),
    "partly rotated, heads of 512": Case(head_dim=512, rotary_dim=128, heads=3, kv_heads=1, norm=True, wide=True),
    "heads of 256, fp8": Case(head_dim=256, rotary_dim=256, heads=2, kv_heads=1, cache=FP8),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, device: torch.device) -> None:
    """Queries, and the whole cache: what no slot names stays."""
    from starling_engine.kernels.store import qk_norm_rope_store

    case = CASES[name]
    generator = torch.Generator().manual_seed(1)
    dim = case.head_dim
    qkv = (4 * torch.randn(len(SLOTS), (case.heads + 2 * case.kv_heads) * dim, generator=generator)).to(case.dtype)
    norms = [
        torch.rand(dim, generator=generator).to(FP32 if case.wide else case.dtype).to(device) if case.norm else None
        for _ in range(2)
    ]
    cos_sin = build_cos_sin(RopeConfig(), case.rotary_dim, 256, device)
    kv = torch.full((96 // case.block_size, 2, case.kv_heads, case.block_size, dim), 5.0, dtype=case.dtype, device=device)
    cache = in_slabs(kv.to(case.cache or case.dtype))
    places = torch.tensor(POSITIONS, device=device), cos_sin, *norms, 1e-6
    slots = torch.tensor(SLOTS, device=device)
    scales = {"key_scale": 0.25, "value_scale": 0.01} if case.cache else {}
    queries = qk_norm_rope_store(qkv.to(device), *places, cache, slots, **scales)
    expected = reference.qk_norm_rope_store(qkv.to(device), *places, kv, slots)

    assert_untouched(cache)
    tolerance = {FP32: 1e-6, FP16: 1e-3, BF16: 8e-3}[case.dtype]
    torch.testing.assert_close(queries, expected, rtol=tolerance, atol=tolerance)
    if case.cache:
        written = torch.zeros(kv.shape, dtype=torch.bool, device=device)
        for slot in SLOTS:
            if slot >= 0:
                written[slot // case.block_size, :, :, slot % case.block_size] = True
        assert (cache.float()[~written] == 5.0).all()
        for part, scale in enumerate(scales.values()):
            largest = scale * torch.finfo(FP8).max
            held = kv[:, part].float().clamp(-largest, largest)[written[:, part]]
            # Three bits of mantissa; what is held to the largest is exact.
            torch.testing.assert_close(cache[:, part].float()[written[:, part]] * scale, held, rtol=2**-4, atol=scale * 2**-9)
        assert kv[:, 1].abs()[written[:, 1]].max() > 0.01 * torch.finfo(FP8).max, "no value was too large"
    else:
        torch.testing.assert_close(cache, kv, rtol=tolerance, atol=tolerance)


CODED = {
    "plain": Case(head_dim=128, rotary_dim=128, heads=17, kv_heads=3),
    "partly rotated, fp16": Case(rotary_dim=24, dtype=FP16),
    "heads of 96, fp32": Case(head_dim=96, rotary_dim=96, block_size=8, dtype=FP32),
    "heads of 32": Case(head_dim=32, rotary_dim=32, heads=1, kv_heads=1),
}


@pytest.mark.parametrize("cache", [BF16, INT8])
def test_queries_alone_leave_the_cache_as_it_is(cache: torch.dtype, device: torch.device) -> None:
    """Queries have more heads than a program has."""
    from starling_engine.kernels.store import qk_norm_rope_store

    dim, heads = 64, 18
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(7, (heads + 2) * dim, generator=generator).to(BF16).to(device)
    norms = [torch.rand(dim, generator=generator).to(device)] * 2
    arguments = torch.arange(7, device=device), build_cos_sin(RopeConfig(), 48, 256, device), *norms, 1e-6
    kv, slots = cached(torch.randn(1, 2, 1, 16, dim), cache, 1.0).to(device), torch.arange(7, device=device)
    found = kv.clone()
    queries = qk_norm_rope_store(qkv[:, : heads * dim], *arguments, found, slots, stores=False)
    assert torch.equal(found, kv)
    assert torch.equal(queries, qk_norm_rope_store(qkv, *arguments, found, slots)) and not torch.equal(found, kv)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("cache", [INT8, INT4])
@pytest.mark.parametrize("name", CODED)
def test_codes_are_those_of_the_reference(name: str, cache: torch.dtype, device: torch.device) -> None:
    """They say the same numbers to the bit, since tiers hand them to CPUs: also what no code holds, and what is no number."""
    from starling_engine.kernels.store import qk_norm_rope_store

    case, generator = CODED[name], torch.Generator().manual_seed(1)
    numbers = [None, 0.0, 1e-9, 1e-6, -3.0, 6e4, 1e9, torch.inf, -torch.inf, torch.nan]
    qkv = torch.randn(2 * len(numbers), case.heads + 2 * case.kv_heads, case.head_dim, generator=generator)
    for token, number in enumerate(numbers):
        if number is not None:
            qkv[2 * token, case.heads :, 3] = number
            qkv[2 * token + 1, case.heads :] = number
    places = torch.randint(0, 256, (len(qkv),), generator=generator).to(device)
    slots = torch.randperm(96, generator=generator)[: len(qkv)]
    slots[5] = -1
    kv = torch.zeros(96 // case.block_size, 2, case.kv_heads, case.block_size, case.head_dim)
    found = in_slabs(cached(kv, cache, 1.0).to(device))
    expected = found.clone()
    arguments = qkv.flatten(1).to(case.dtype).to(device), places, build_cos_sin(RopeConfig(), case.rotary_dim, 256, device)
    with np.errstate(invalid="ignore", over="ignore"):
        qk_norm_rope_store(*arguments, None, None, 1e-6, found, slots.to(device))
    reference.qk_norm_rope_store(*arguments, None, None, 1e-6, expected, slots.to(device))
    assert_untouched(found)
    # What is read: a group of NaN may have any code, and a least number of 0 either sign.
    torch.testing.assert_close(uncached(found, FP32), uncached(expected, FP32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache", [INT8, INT4])
def test_codes_are_of_what_was_normalised(cache: torch.dtype, device: torch.device) -> None:
    from starling_engine.kernels.store import qk_norm_rope_store

    dim, generator = 64, torch.Generator().manual_seed(1)
    qkv = (4 * torch.randn(7, 8 * dim, generator=generator)).to(device)
    norms = [torch.rand(dim, generator=generator).to(device) for _ in range(2)]
    arguments = qkv, torch.arange(7, device=device), build_cos_sin(RopeConfig(), 48, 256, device), *norms, 1e-6
    kv, slots = torch.zeros(1, 2, 2, 16, dim, device=device), torch.arange(7, device=device)
    found = cached(kv, cache, 1.0)
    queries = qk_norm_rope_store(*arguments, found, slots)
    torch.testing.assert_close(queries, reference.qk_norm_rope_store(*arguments, kv, slots))
    # Up to half a step between codes.
    torch.testing.assert_close(uncached(found, FP32), kv, rtol=0, atol=kv.abs().max().item() / (250 if cache == INT8 else 14))
