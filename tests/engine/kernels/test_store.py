"""The kernel before attention against its torch reference."""

from dataclasses import dataclass

import pytest
import torch
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config.rope import RopeConfig
from starling_engine.native import reference

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
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None


CASES = {
    "plain": Case(),
    "head norms": Case(norm=True, head_dim=128, rotary_dim=128, heads=16, kv_heads=8),
    "head norms, fp32": Case(norm=True, dtype=FP32, block_size=8),
    "partly rotated, fp16": Case(rotary_dim=24, dtype=FP16),
    "partly rotated, head norms": Case(rotary_dim=48, head_dim=80, norm=True, heads=5, kv_heads=1),
    "heads of 96": Case(head_dim=96, rotary_dim=96, block_size=32),
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
    norms = [torch.rand(dim, generator=generator).to(case.dtype).to(device) if case.norm else None for _ in range(2)]
    cos_sin = build_cos_sin(RopeConfig(), case.rotary_dim, 256, device)
    kv = torch.full((96 // case.block_size, 2, case.kv_heads, case.block_size, dim), 5.0, dtype=case.dtype, device=device)
    cache = kv.to(case.cache or case.dtype)
    places = torch.tensor(POSITIONS, device=device), cos_sin, *norms, 1e-6
    slots = torch.tensor(SLOTS, device=device)
    scales = {"key_scale": 0.25, "value_scale": 0.01} if case.cache else {}
    queries = qk_norm_rope_store(qkv.to(device), *places, cache, slots, **scales)
    expected = reference.qk_norm_rope_store(qkv.to(device), *places, kv, slots)

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
