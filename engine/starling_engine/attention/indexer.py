"""Indexers of sparse attention (arXiv 2512.02556, section 2.1), in torch: they score all earlier tokens, and choose the best ones.

A token's index key lies behind its latent in the paged cache. A score is the sum over the indexer's heads of

    weight of the query and head * relu(query of the head . key) / sqrt(dim * heads)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from starling_engine.attention.mla_torch import gather_rows, rotate_pairs, store_rows
from starling_engine.attention.torch_paged import rotate
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.model_config.mla_shape import IndexShape, MlaShape, QuerySpan, spans


@dataclass(slots=True)
class IndexQuery:
    """An indexer's queries of a step: q [T, heads * dim], not yet rotated, and weights [T, heads] fp32."""

    q: torch.Tensor
    weights: torch.Tensor


def store_keys(k: torch.Tensor, shape: MlaShape, cos_sin: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata) -> None:
    """Rotates the step's index keys k [T, dim] and writes them behind their latents in kv [num_blocks, block_size, row_dim]."""
    assert shape.index is not None, "an indexer has sizes"
    turned = _turned(k.unsqueeze(1), cos_sin[meta.positions], shape.rope_dim, interleaved=shape.index.interleaved)
    store_rows(kv[..., shape.latent_dim :], turned.squeeze(1), meta.slot_mapping)


def spans_to_choose(shape: MlaShape, meta: AttentionMetadata) -> list[QuerySpan]:
    """Returns the sequences of a step that are too long to attend to all of their tokens."""
    step = spans(*meta.lens())
    return [span for span in step if shape.is_chosen(span.context)]


def choose(
    query: IndexQuery, shape: MlaShape, cos_sin: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, step: Sequence[QuerySpan]
) -> torch.Tensor:
    """Returns the choice of the tokens of `step` (as `AttentionMetadata.chosen`), whose index keys are stored already."""
    index = shape.index
    assert index is not None, "an indexer has sizes"
    chosen = torch.full((len(query.q), index.top), -1, dtype=torch.int32, device=query.q.device)
    weights = query.weights * (index.dim * index.num_heads) ** -0.5
    for span in step:
        row = slice(span.row, span.row + 1)
        keys = gather_rows(kv[..., shape.latent_dim :], meta.block_tables[row], meta.context_lens[row], span.context)[0]
        before = span.context - span.queries
        size = index.rows_at_once(span.context)
        for first in range(0, span.queries, size):
            last = min(first + size, span.queries)
            own = slice(span.start + first, span.start + last)
            heads = query.q[own].view(last - first, index.num_heads, index.dim)
            q = _turned(heads, cos_sin[meta.positions[own]], shape.rope_dim, interleaved=index.interleaved)
            scores = score(q, weights[own], keys[: before + last], index)
            _mask_later(scores, before + first)
            best = scores.topk(min(index.top, scores.shape[1]), sorted=False)
            chosen[own, : best.indices.shape[1]] = best.indices.masked_fill_(best.values == float("-inf"), -1).int()
    return chosen


def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, index: IndexShape) -> torch.Tensor:
    """q [M, heads, dim], weights [M, heads] fp32, keys [N, dim] -> scores [M, N] fp32, some keys at a time."""
    scores = torch.empty(len(q), len(keys), dtype=torch.float32, device=q.device)
    flat, size = q.float().flatten(0, 1), index.keys_at_once(len(q))
    for first in range(0, len(keys), size):
        products = (flat @ keys[first : first + size].float().T).relu_()
        torch.bmm(weights[:, None], products.view(*q.shape[:2], -1), out=scores[:, None, first : first + size])
    return scores


def _mask_later(scores: torch.Tensor, first: int) -> None:
    """Hides from each row the keys behind its own: row i is of the token at position `first` + i."""
    queries, keys = scores.shape
    at = torch.arange(keys, device=scores.device)
    scores.masked_fill_(at > (first + torch.arange(queries, device=scores.device))[:, None], float("-inf"))


def _turned(x: torch.Tensor, table: torch.Tensor, rope_dim: int, *, interleaved: bool) -> torch.Tensor:
    """Rotates the first `rope_dim` elements of x [T, heads, dim] by rows [T, columns] of the table. The others stay."""
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    turn = rotate_pairs if interleaved else rotate
    return torch.cat([turn(x[..., :rope_dim], cos, sin), x[..., rope_dim:]], dim=-1)
