"""Multi-head latent attention over the paged cache, in plain torch; see `mla_shape.py` for its two forms."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from starling_engine.attention.mla_base import MlaBackend, MlaWeights
from starling_engine.attention.torch_paged import rotate
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.matmul import bmm, linear
from starling_engine.model_config.mla_shape import QUERY_ROWS, QuerySpan, plan_forms, spans


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
        plan = plan_forms(spans(meta.query_start.tolist(), meta.context_lens.tolist()), shape)
        for batch in plan.absorbed:
            attend_absorbed(query, layer, latents, meta, batch, out)
        for span in plan.expanded:
            attend_expanded(query, layer, latents, meta, span, out)
        if plan.chosen:
            attend_chosen(query, layer, latents, meta, plan.chosen, out)
        return out.flatten(1)


def attend_absorbed(
    query: Query, layer: MlaWeights, kv: torch.Tensor, meta: AttentionMetadata, batch: Sequence[QuerySpan], out: torch.Tensor
) -> None:
    """Fills the rows of `batch` (as `plan_forms` makes it) in `out` [T, H, value_dim].

    For torch's kernel a query token is a head, and its heads are the rows: they share one read of the latents.
    """
    device, shape, queries = kv.device, layer.shape, batch[0].queries
    starts = torch.tensor([span.start for span in batch], device=device)
    tokens = (starts[:, None] + torch.arange(queries, device=device)).flatten()
    q = torch.cat([_by_head(query.nope[tokens], layer.w_uk), query.rope[tokens]], dim=-1)
    rows = torch.tensor([span.row for span in batch], device=device)
    latents = gather_rows(kv, meta, rows, batch[-1].context)[:, None].expand(-1, queries, -1, -1)
    key_at = torch.arange(latents.shape[2], device=device)
    seen = key_at <= meta.positions[tokens].view(-1, queries, 1, 1)
    # The whole latent as value: torch's fused kernel needs values as wide as keys. The rest is cut off.
    q = q.view(len(batch), queries, shape.num_heads, shape.latent_dim)
    mixed = F.scaled_dot_product_attention(q, latents, latents, attn_mask=seen, scale=layer.scale)
    out[tokens] = _by_head(mixed.flatten(0, 1)[..., : shape.kv_rank], layer.w_uv.transpose(1, 2))


def attend_chosen(
    query: Query, layer: MlaWeights, kv: torch.Tensor, meta: AttentionMetadata, step: Sequence[QuerySpan], out: torch.Tensor
) -> None:
    """Fills the rows of these sequences in `out` [T, H, value_dim]: each token attends to the latents of those chosen for it.

    It does so in the absorbed form, a few tokens at a time, for each reads others.
    """
    assert meta.chosen is not None, "an indexer has chosen for sequences of such length"
    device, shape, block_size = kv.device, layer.shape, kv.shape[1]
    counts = torch.tensor([span.queries for span in step], device=device)
    sequences = torch.tensor([span.row for span in step], device=device).repeat_interleave(counts)
    tokens = torch.cat([torch.arange(span.start, span.start + span.queries, device=device) for span in step])
    size = shape.chosen_at_once()
    for own, rows in zip(torch.split(tokens, size), torch.split(sequences, size), strict=True):
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
    row = torch.tensor([span.row], device=kv.device)
    latents = gather_rows(kv, meta, row, span.context)[0]
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


def gather_rows(kv: torch.Tensor, meta: AttentionMetadata, rows: torch.Tensor, longest: int) -> torch.Tensor:
    """Cached rows [len(rows), longest, width] of the sequences in `rows`, of kv [num_blocks, block_size, width].

    Past its end a sequence's last row is repeated: the rest of its last block may be anything, even NaN.
    """
    block_size = kv.shape[1]
    last = meta.context_lens[rows].long() - 1
    at = torch.arange(longest, device=kv.device).clamp(max=last[:, None])
    blocks = meta.block_tables[rows].long().gather(1, at // block_size)
    return kv[blocks, at % block_size]


def store_rows(kv: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes values [T, width] where `slot_mapping` says. A token with -1 is left out."""
    if (slot_mapping < 0).any():
        values, slot_mapping = values[slot_mapping >= 0], slot_mapping[slot_mapping >= 0]
    kv[slot_mapping // kv.shape[1], slot_mapping % kv.shape[1]] = values


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, K], weight [H, K, L] -> [T, H, L], each head by its own matrix."""
    return bmm(x.transpose(0, 1), weight).transpose(0, 1)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs that lie side by side. The result is in two halves: the order does not matter to a dot product."""
    return rotate(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1), cos, sin)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
