"""Multi-head latent attention over the paged cache, in plain torch; see `mla_shape.py` for its two forms."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from starling_engine.attention.mla_base import MlaBackend, MlaWeights
from starling_engine.attention.torch_paged import rotate
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.matmul import bmm, linear
from starling_engine.model_config.mla_shape import QUERY_ROWS, MlaShape, QuerySpan, plan_forms, spans


@dataclass(slots=True)
class Query:
    """Queries of a step: nope [T, H, nope_dim] as projected, rope [T, H, rope_dim] rotated."""

    nope: torch.Tensor
    rope: torch.Tensor


class TorchMla(MlaBackend):
    """Any dtype and device."""

    name = "torch"
    capturable = False
    cascades = False
    takes_query_blocks = False

    def forward(
        self,
        q: torch.Tensor,
        c: torch.Tensor,
        k_rope: torch.Tensor,
        layer: MlaWeights,
        kv: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """See `MlaBackend`."""
        shape = layer.shape
        nope, rope = torch.split(q.view(len(q), shape.num_heads, -1), [shape.nope_dim, shape.rope_dim], dim=-1)
        turn = rotate_pairs if shape.interleaved else rotate
        cos, sin = layer.cos_sin[meta.positions].unsqueeze(1).chunk(2, dim=-1)
        query = Query(nope, turn(rope, cos, sin))
        latents = kv[..., : shape.latent_dim]
        store_rows(latents, torch.cat([c, turn(k_rope.unsqueeze(1), cos, sin).squeeze(1)], dim=-1), meta.slot_mapping)
        out = q.new_empty(len(q), shape.num_heads, shape.value_dim)
        step = meta.once(shape, lambda: _plan(meta, shape))
        for batch in step.absorbed:
            attend_absorbed(query, layer, latents, meta, batch, out)
        for span in step.expanded:
            attend_expanded(query, layer, latents, meta, span, out)
        if step.chosen is not None:
            attend_chosen(query, layer, latents, meta, step.chosen, out)
        return out.flatten(1)


@dataclass(slots=True)
class LatentBatch:
    """Sequences that attend together, the longest of `context` tokens.

    rows    [B] int64, of the sequences, or [N] of each of their tokens
    tokens  [N] int64, which these are
    queries of each sequence
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    queries: int
    context: int


@dataclass(slots=True)
class LatentPlan:
    """Sequences of a step as `plan_forms` parts them. All layers of a shape use it."""

    absorbed: list[LatentBatch]
    expanded: list[QuerySpan]
    chosen: LatentBatch | None


def _plan(meta: AttentionMetadata, shape: MlaShape) -> LatentPlan:
    plan = plan_forms(spans(*meta.lens()), shape)
    absorbed = [
        LatentBatch(meta.send([span.row for span in batch]), meta.send(_tokens(batch)), batch[0].queries, batch[-1].context)
        for batch in plan.absorbed
    ]
    chosen = None
    if plan.chosen:
        rows = [span.row for span in plan.chosen for _ in range(span.queries)]
        chosen = LatentBatch(meta.send(rows), meta.send(_tokens(plan.chosen)), 1, max(span.context for span in plan.chosen))
    return LatentPlan(absorbed, plan.expanded, chosen)


def _tokens(step: Sequence[QuerySpan]) -> list[int]:
    return [token for span in step for token in range(span.start, span.start + span.queries)]


def attend_absorbed(
    query: Query, layer: MlaWeights, kv: torch.Tensor, meta: AttentionMetadata, batch: LatentBatch, out: torch.Tensor
) -> None:
    """Fills the rows of `batch` in `out` [T, H, value_dim].

    For torch's kernel a query token is a head, and its heads are the rows: they share one read of the latents.
    """
    shape, tokens, queries = layer.shape, batch.tokens, batch.queries
    q = torch.cat([_by_head(query.nope[tokens], layer.w_uk), query.rope[tokens]], dim=-1)
    latents = gather_rows(kv, meta.block_tables[batch.rows], meta.context_lens[batch.rows], batch.context)
    latents = latents[:, None].expand(-1, queries, -1, -1)
    key_at = torch.arange(latents.shape[2], device=kv.device)
    seen = key_at <= meta.positions[tokens].view(-1, queries, 1, 1)
    # The whole latent as value: torch's fused kernel needs values as wide as keys. The rest is cut off.
    q = q.view(len(latents), queries, shape.num_heads, shape.latent_dim)
    mixed = F.scaled_dot_product_attention(q, latents, latents, attn_mask=seen, scale=layer.scale)
    out[tokens] = _by_head(mixed.flatten(0, 1)[..., : shape.kv_rank], layer.w_uv.transpose(1, 2))


def attend_chosen(
    query: Query, layer: MlaWeights, kv: torch.Tensor, meta: AttentionMetadata, batch: LatentBatch, out: torch.Tensor
) -> None:
    """Fills the rows of `batch` in `out` [T, H, value_dim]: each token attends to the latents of those chosen for it.

    It does so in the absorbed form, a few tokens at a time, for each reads others.
    """
    assert meta.chosen is not None, "an indexer has chosen for sequences of such length"
    shape, block_size = layer.shape, kv.shape[1]
    size = shape.chosen_at_once()
    for own, rows in zip(torch.split(batch.tokens, size), torch.split(batch.rows, size), strict=True):
        chosen = meta.chosen[own].long()
        at = chosen.clamp(min=0)
        blocks = meta.block_tables[rows].long().gather(1, at // block_size)
        latents = kv[blocks, at % block_size].unsqueeze(1)
        q = torch.cat([_by_head(query.nope[own], layer.w_uk), query.rope[own]], dim=-1).unsqueeze(1)
        seen = (chosen >= 0)[:, None, None]
        mixed = F.scaled_dot_product_attention(q, latents, latents, attn_mask=seen, scale=layer.scale).squeeze(1)
        out[own] = _by_head(mixed[..., : shape.kv_rank], layer.w_uv.transpose(1, 2))


def attend_expanded(
    query: Query, layer: MlaWeights, kv: torch.Tensor, meta: AttentionMetadata, span: QuerySpan, out: torch.Tensor
) -> None:
    """Fills the rows of one sequence in `out` [T, H, value_dim], a few heads at a time. Tokens that are not chosen are masked."""
    shape, own = layer.shape, slice(span.start, span.start + span.queries)
    q = _padded(torch.cat([query.nope[own], query.rope[own]], dim=-1), shape.expanded_dim).transpose(0, 1)
    row = slice(span.row, span.row + 1)
    latents = gather_rows(kv, meta.block_tables[row], meta.context_lens[row], span.context)[0]
    result = out[own].transpose(0, 1)
    chosen: torch.Tensor | None = None
    if shape.is_chosen(span.context):
        assert meta.chosen is not None, "an indexer has chosen for sequences of such length"
        chosen = meta.chosen[own]
    step = shape.heads_at_once(span.context)
    for first in range(0, shape.num_heads, step):
        heads = slice(first, first + step)
        k, v = _expand(latents, layer, heads)
        _attend_in_rows(q[heads], k, v, layer.scale, result[heads], chosen)


def _attend_in_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, chosen: torch.Tensor | None
) -> None:
    """q [G, M, D], the last M tokens of a sequence whose k and v are [G, N, D] -> out [G, M, value_dim].

    With `chosen` [M, K] each attends to these positions, and elsewhere to all up to its own.
    """
    queries, context = q.shape[1], k.shape[1]
    key_at = torch.arange(context, device=k.device)
    for first in range(0, queries, QUERY_ROWS):
        last = min(first + QUERY_ROWS, queries)
        end = context - queries + last
        if chosen is None:
            seen = key_at[:end] <= key_at[end - (last - first) : end, None]
        else:
            seen = _mask_of(chosen[first:last], end)
        rows = F.scaled_dot_product_attention(
            q[None, :, first:last], k[None, :, :end], v[None, :, :end], attn_mask=seen, scale=scale
        )
        out[:, first:last] = rows[0, ..., : out.shape[-1]]


def _mask_of(chosen: torch.Tensor, keys: int) -> torch.Tensor:
    """chosen [M, K] positions, -1 for none -> [M, keys] bool."""
    mask = torch.zeros(len(chosen), keys + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, chosen.long() % (keys + 1), True)[:, :keys]


def _expand(latents: torch.Tensor, layer: MlaWeights, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """latents [N, latent_dim] -> keys and values [G, N, expanded_dim] of these heads."""
    shape = layer.shape
    c, k_rope = torch.split(latents, [shape.kv_rank, shape.rope_dim], dim=-1)
    w_uk, w_uv = layer.w_uk[heads], layer.w_uv[heads]
    k_nope = linear(c, w_uk.flatten(0, 1)).view(len(c), len(w_uk), -1)
    keys = torch.cat([k_nope, k_rope[:, None].expand(-1, len(w_uk), -1)], dim=-1)
    values = linear(c, w_uv.flatten(0, 1)).view(len(c), len(w_uv), -1)
    return _padded(keys, shape.expanded_dim).transpose(0, 1), _padded(values, shape.expanded_dim).transpose(0, 1)


def gather_rows(kv: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """Gathers cached rows [B, longest, width] of sequences with these block tables and lengths [B].

    kv is [num_blocks, block_size, width].

    Past its end a sequence's last row is repeated: the rest of its last block may be anything, even NaN.
    """
    block_size = kv.shape[1]
    at = torch.arange(longest, device=kv.device).clamp(max=lengths.long()[:, None] - 1)
    blocks = tables.long().gather(1, at // block_size)
    return kv[blocks, at % block_size]


def store_rows(kv: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes values [T, width] where `slot_mapping` says. A token with -1 is left out.

    Nothing asks the device whether there is one: it writes again what is in the null block, which is nobody's.
    """
    slots = slot_mapping.clamp(min=0)
    blocks, places = slots // kv.shape[1], slots % kv.shape[1]
    kv[blocks, places] = torch.where(slot_mapping[:, None] < 0, kv[blocks, places], values)


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, K], weight [H, K, L] -> [T, H, L], each head by its own matrix."""
    return bmm(x.transpose(0, 1), weight).transpose(0, 1)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs that lie side by side. The result is in two halves: the order does not matter to a dot product."""
    return rotate(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), cos, sin)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
