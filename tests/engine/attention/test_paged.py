"""Each backend against attention written out in full, over shapes and options that the models do not have."""

from dataclasses import replace

import pytest
import torch
from starling_engine import native
from starling_engine.attention.base import AttentionBackend, AttentionWeights
from starling_engine.attention.native_cpu import NativeAttention
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config.rope import RopeConfig
from torch.nn import functional as F

BLOCK = 8
CPU = torch.device("cpu")
PLAIN = AttentionWeights(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    scale=0.25,
    window=0,
    soft_cap=0.0,
    cos_sin=build_cos_sin(RopeConfig(), 16, 256, CPU),
    q_norm=None,
    k_norm=None,
    norm_eps=1e-6,
)
NORMS = (torch.linspace(0.5, 1.5, 16), torch.linspace(1.5, 0.5, 16))
SINKS = torch.tensor([2.0, -1.0, 0.5, 3.0])
LAYERS = {
    "plain": PLAIN,
    "one head each": replace(PLAIN, num_kv_heads=4),
    "one for all": replace(PLAIN, num_kv_heads=1),
    "window": replace(PLAIN, window=11),
    "window of one block": replace(PLAIN, window=BLOCK),
    "soft cap": replace(PLAIN, soft_cap=2.0),
    "soft cap in a window": replace(PLAIN, soft_cap=2.0, window=13),
    "head norms": replace(PLAIN, q_norm=NORMS[0], k_norm=NORMS[1]),
    "half rotated": replace(PLAIN, cos_sin=build_cos_sin(RopeConfig(), 8, 256, CPU)),
    "scale": replace(PLAIN, scale=1.0),
    "sinks": replace(PLAIN, sinks=SINKS),
    "sinks, a soft cap and a window": replace(PLAIN, sinks=SINKS, soft_cap=2.0, window=13),
}


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "torch":
        return TorchPagedAttention()
    if native.load() is None:
        pytest.skip("this machine has no native kernels")
    return NativeAttention()


def width(layer: AttentionWeights) -> int:
    return (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates by complex numbers, unlike either backend. x [T, heads, D], one row of the table a token."""
    half = table.shape[-1] // 2
    turns = torch.complex(table[:, :half], table[:, half:])[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turns
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def whole(qkv: torch.Tensor, layer: AttentionWeights) -> torch.Tensor:
    """One sequence from its first token on: qkv [T, width] -> [T, heads * D]."""
    tokens, dim = len(qkv), layer.head_dim
    heads = qkv.view(tokens, -1, dim)
    q, k, v = (part for part in torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1))
    q = q if layer.q_norm is None else F.rms_norm(q, (dim,), layer.q_norm, layer.norm_eps)
    k = k if layer.k_norm is None else F.rms_norm(k, (dim,), layer.k_norm, layer.norm_eps)
    q, k = (rotate(x, layer.cos_sin[:tokens]) for x in (q, k))
    group = layer.num_heads // layer.num_kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    hidden = (age < 0) | ((age >= layer.window) if layer.window else (age < 0))
    scores = scores.masked_fill(hidden, float("-inf"))
    mass = scores.exp().sum(-1, keepdim=True)
    if layer.sinks is not None:
        mass = mass + layer.sinks.exp().view(-1, 1, 1)
    weights = scores.exp() / mass
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def metadata(rows: list[tuple[int, int]], tables: torch.Tensor) -> AttentionMetadata:
    """`rows` are (first position, tokens) of sequence 0, 1, ..."""
    positions = [torch.arange(start, start + count) for start, count in rows]
    slots = [table[at // BLOCK].long() * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)]
    counts = torch.tensor([0] + [count for _, count in rows])
    return AttentionMetadata(
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_start=counts.cumsum(0).to(torch.int32),
        context_lens=torch.tensor([start + count for start, count in rows], dtype=torch.int32),
        block_tables=tables,
        max_query_len=int(counts.max()),
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_equals_attention_written_out(name: str, dtype: torch.dtype, tolerance: float, backend: AttentionBackend) -> None:
    """Two sequences of 37 and 20 tokens, in chunks that end inside blocks, then one token each."""
    layer = LAYERS[name]
    if layer.q_norm is not None and layer.k_norm is not None:
        layer = replace(layer, q_norm=layer.q_norm.to(dtype), k_norm=layer.k_norm.to(dtype))
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randn(length, width(layer), generator=generator).to(dtype) for length in (37, 20)]
    kv = torch.full((12, 2, layer.num_kv_heads, BLOCK, layer.head_dim), float("nan"), dtype=dtype)
    tables = torch.tensor([[7, 2, 9, 4, 1], [3, 8, 5, 0, 0]], dtype=torch.int32)
    done, found = [0, 0], [[], []]
    for counts in ((21, 3), (1, 16), (14, 0), (1, 1)):
        rows = [(start, count) for start, count in zip(done, counts, strict=True)]
        qkv = torch.cat([part[start : start + count] for part, (start, count) in zip(sequences, rows, strict=True)])
        out = backend.forward(qkv.clone(), layer, kv, metadata(rows, tables))
        assert out.dtype == dtype
        for sequence, part in enumerate(out.split(counts)):
            found[sequence].append(part)
            done[sequence] += counts[sequence]
    for sequence, parts in zip(sequences, found, strict=True):
        norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        wide = replace(layer, **{key: norm if norm is None else norm.float() for key, norm in norms.items()})
        expected = whole(sequence.float(), wide)
        torch.testing.assert_close(torch.cat(parts).float(), expected, atol=tolerance, rtol=tolerance)


def test_a_token_without_a_slot_stores_nothing(backend: AttentionBackend) -> None:
    qkv = torch.randn(3, width(PLAIN), generator=torch.Generator().manual_seed(0))
    kv = torch.full((4, 2, 2, BLOCK, 16), 5.0)
    meta = metadata([(0, 3)], torch.tensor([[2]], dtype=torch.int32))
    meta.slot_mapping[1] = -1
    backend.forward(qkv, PLAIN, kv, meta)
    written = (kv != 5.0).flatten(3).any(-1)
    assert written.nonzero()[:, 0].unique().tolist() == [2]
    assert (kv[2, :, :, 1] == 5.0).all()
    assert (kv[2, :, :, [0, 2]] != 5.0).all()
