"""Launches for real models' shapes, to be compiled in a process of their own, which should not import more than they need."""

import torch
from starling_engine.attention.mla_base import MlaWeights
from starling_engine.attention.mla_triton import attend_expanded
from starling_engine.kernels import grouped, mla, routing
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.mla_store import rotate_and_store
from starling_engine.layers.expert_biases import ExpertBiases
from starling_engine.layers.experts import ExpertsShape
from starling_engine.model_config.mla_shape import MlaShape, QuerySpan
from starling_engine.model_config.moe import ClampedSwiglu, Routing
from starling_engine.topology.shard import Share

BF16 = torch.bfloat16
V3 = MlaShape(num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True)


def empty(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def route(case: Routing) -> None:
    bias = empty(case.num_experts, dtype=torch.float32) if case.bias else None
    routing.route(empty(64, case.num_experts, dtype=torch.float32), case, bias)


def experts(tokens: int) -> None:
    """A layer of Qwen3-30B-A3B."""
    slots, weights = empty(tokens, 8, dtype=torch.int64), empty(tokens, 8, dtype=torch.float32)
    tiles = grouped.tiles_for(tokens, 8, 128, BF16)
    grouped.experts(empty(tokens, 2048), slots, weights, empty(128, 2 * 768, 2048), empty(128, 2048, 768), tiles)


def biased_experts(tokens: int) -> None:
    """A layer of gpt-oss-20b."""
    shape = ExpertsShape(32, 32, 2880, Share.all(2880), bias=True, gate=ClampedSwiglu(1.702, 7.0))
    slots, weights = empty(tokens, 4, dtype=torch.int64), empty(tokens, 4, dtype=torch.float32)
    biases, tiles = ExpertBiases(shape, BF16, slots.device), grouped.tiles_for(tokens, 4, 32, BF16)
    gate_ups, downs = empty(32, 2 * 2880, 2880), empty(32, 2880, 2880)
    grouped.experts(empty(tokens, 2880), slots, weights, gate_ups, downs, tiles, biases.both, shape.gate)


def step(rows: int, queries: int) -> AttentionMetadata:
    """Makes sequences of `queries` tokens each, with contexts of up to 8192."""
    tokens = rows * queries
    return AttentionMetadata(
        empty(tokens, dtype=torch.int64),
        empty(tokens, dtype=torch.int64),
        empty(rows + 1, dtype=torch.int32),
        empty(rows, dtype=torch.int32),
        empty(rows, 512, dtype=torch.int32),
        queries,
    )


def absorbed(rows: int, queries: int, heads: int) -> None:
    tokens = rows * queries
    kv = empty(1024, 16, V3.latent_dim)
    mla.attend(empty(heads, tokens, V3.kv_rank), empty(tokens, heads, 64), kv, step(rows, queries), 0.1, sms=132)


def expanded() -> None:
    layer = MlaWeights(V3, 0.1, empty(1), empty(128, 128, 512), empty(128, 128, 512))
    q, q_rope, kv, out = empty(2048, 128, 128), empty(2048, 128, 64), empty(1024, 16, V3.latent_dim), empty(2048, 128, 128)
    attend_expanded(q, q_rope, layer, kv, step(1, 2048), QuerySpan(0, 0, 2048, 8192), out)


def store() -> None:
    meta, cos_sin, kv = step(64, 1), empty(4096, 64, dtype=torch.float32), empty(1024, 16, V3.latent_dim)
    q, c, k_rope = empty(64, 128, 192), empty(64, 512), empty(64, 64)
    rotate_and_store(q, c, k_rope, meta.positions, cos_sin, kv, meta.slot_mapping, interleaved=True)
