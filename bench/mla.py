"""Where the two forms of latent attention cost the same: measured, against the rule that `MlaShape.most_absorbed` goes by.

    python bench/mla.py [--model v2-lite|v3] [--heads 16] [--context 2048] [--dtype bfloat16] [--seconds 0.5]

One layer, one sequence; time of the absorbed over the expanded form at a growing number of queries. Below 1 the absorbed one wins.
"""

import argparse
from functools import partial

import torch
from native_kernels import Clock
from shared import machine
from starling_engine.attention.mla_torch import LatentBatch, MlaWeights, Query, attend_absorbed, attend_expanded
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config.mla_shape import MlaShape, QuerySpan
from starling_engine.model_config.rope import RopeConfig

BLOCK = 16
HEADS = {"v2-lite": 16, "v3": 128}
QUERIES = (1, 4, 8, 16, 24, 32, 48, 64, 128)


def metadata(queries: int, context: int) -> AttentionMetadata:
    blocks = -(-context // BLOCK)
    positions = torch.arange(context - queries, context)
    return AttentionMetadata(
        positions=positions,
        slot_mapping=positions,
        query_start=torch.tensor([0, queries], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=torch.randperm(blocks)[None].to(torch.int32),
        max_query_len=queries,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=HEADS, default="v2-lite")
    parser.add_argument("--heads", type=int, default=0, help="other than the model's")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    heads, dtype, clock = args.heads or HEADS[args.model], getattr(torch, args.dtype), Clock(args.seconds)
    shape = MlaShape(num_heads=heads, q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True)
    w_uk, w_uv = (torch.randn(heads, 128, 512).to(dtype) * 0.04 for _ in range(2))
    layer = MlaWeights(shape, 0.07, build_cos_sin(RopeConfig(), 64, 1, torch.device("cpu")), w_uk, w_uv)
    kv = torch.randn(-(-args.context // BLOCK), BLOCK, shape.latent_dim).to(dtype)
    print(f"{machine()}.")
    print(f"{heads} heads, {args.context} tokens: the rule absorbs up to {shape.most_absorbed(args.context)} queries")
    for queries in QUERIES:
        if queries > args.context:
            continue
        query = Query(torch.randn(queries, heads, 128).to(dtype), torch.randn(queries, heads, 64).to(dtype))
        span, out = QuerySpan(0, 0, queries, args.context), torch.empty(queries, heads, 128, dtype=dtype)
        meta = metadata(queries, args.context)
        batch = LatentBatch(torch.zeros(1, dtype=torch.int64), torch.arange(queries), queries, args.context)
        absorbed = clock(partial(attend_absorbed, query, layer, kv, meta, batch, out))
        expanded = clock(partial(attend_expanded, query, layer, kv, meta, span, out))
        print(
            f"{queries:4} queries: absorbed {absorbed * 1e3:8.2f} ms, expanded {expanded * 1e3:8.2f} ms, {absorbed / expanded:.2f}"
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
