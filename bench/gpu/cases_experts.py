"""A layer's experts: routing, and the grouped products; and latent attention."""

from collections.abc import Iterator

import torch
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.experts import ExpertsShape
from starling_engine.model_config.moe import Routing
from starling_engine.topology.shard import Share

from bench.gpu.case import Case
from bench.gpu.clock import Call
from bench.gpu.roofline import Cost, chosen_experts

BF16 = torch.bfloat16


def cases(*, toy: bool) -> Iterator[Case]:
    routing = Routing(num_experts=8 if toy else 128, top_k=2 if toy else 8, renormalize=True)
    hidden, inner = (64, 32) if toy else (2048, 768)
    for tokens in (3,) if toy else (1, 64, 8192):
        yield _route(tokens, routing)
        yield _experts(tokens, hidden, inner, routing)
    yield _latents(*((2, 40, 4, 32, 16) if toy else (64, 4096, 128, 512, 64)))


def _route(tokens: int, routing: Routing) -> Case:
    """Reads the logits, writes weights and the numbers of experts."""

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.routing import route

        logits = torch.randn(tokens, routing.num_experts, device=device)
        return lambda: route(logits, routing)

    moved = tokens * (4.0 * routing.num_experts + routing.top_k * (4 + 8))
    return Case(what=f"routing, {tokens} tokens to {routing.top_k} of {routing.num_experts}", make=make, cost=Cost(moved))


def _experts(tokens: int, hidden: int, inner: int, routing: Routing) -> Case:
    """Reads the experts that somebody chose, and each token; writes each token's sum."""

    def make(device: torch.device) -> Call:
        from starling_engine.layers.experts_triton import TritonExperts

        method, experts = TritonExperts(), routing.num_experts
        parts = method.create(ExpertsShape(experts, experts, hidden, Share.all(inner)), BF16, device)
        for slot in range(experts):
            for part in parts:
                shape = [share.size for share in part.shares]
                method.load_part(slot, part, torch.randn(shape, dtype=BF16, device=device) * shape[1] ** -0.5)
        x = torch.randn(tokens, hidden, dtype=BF16, device=device)
        slots = torch.rand(tokens, experts, device=device).topk(routing.top_k).indices
        weights = torch.rand(tokens, routing.top_k, device=device)
        return lambda: method.apply(x, slots, weights)

    expert = 3 * hidden * inner
    chosen = chosen_experts(routing.num_experts, routing.top_k, tokens)
    cost = Cost(2.0 * (chosen * expert + 2 * tokens * hidden), 2.0 * tokens * routing.top_k * expert)
    return Case(
        what=f"experts, {tokens} tokens, {hidden} x {inner}, {routing.top_k} of {routing.num_experts}", make=make, cost=cost
    )


def _latents(sequences: int, context: int, heads: int, rank: int, rope: int) -> Case:
    """Latent attention of one token a sequence, all heads on one read of the latents; DeepSeek-V3's sizes."""
    page = 16

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.mla import attend
        from starling_engine.kernels.paged_attention import sms

        blocks = -(-context // page)
        kv = torch.randn(sequences * blocks, page, rank + rope, dtype=BF16, device=device)
        q_latent = torch.randn(heads, sequences, rank, dtype=BF16, device=device)
        q_rope = torch.randn(sequences, heads, rope, dtype=BF16, device=device)
        at = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        meta = AttentionMetadata(
            positions=torch.full((sequences,), context - 1, device=device),
            slot_mapping=torch.full((sequences,), -1, device=device),
            query_start=at,
            context_lens=torch.full((sequences,), context, dtype=torch.int32, device=device),
            block_tables=torch.randperm(sequences * blocks, device=device).int().view(sequences, blocks),
            max_query_len=1,
        )
        return lambda: attend(q_latent, q_rope, kv, meta, (rank + rope) ** -0.5, sms=sms(device))

    moved = sequences * (context * (rank + rope) + heads * (2 * rank + rope))
    cost = Cost(2.0 * moved, 2.0 * sequences * heads * context * (2 * rank + rope))
    return Case(what=f"latent attention, decode, {sequences} x 1 of {context} tokens, {heads} heads", make=make, cost=cost)
