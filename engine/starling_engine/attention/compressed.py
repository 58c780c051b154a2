"""Attention to a window of tokens and to compressed runs of earlier ones (DeepSeek-V4), in torch, on any dtype and device.

A token's row in the paged cache is

    | its key, which is its value, too (head_dim) | what its run's entry is made of | the same of the entry's index key |

and a complete run of tokens has an entry in blocks of its own:

    | key and value (head_dim) | key for the indexer, where there is one |

Both are rotated as the last elements of a head are: a token at its position, an entry at its run's first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from starling_engine.attention.indexer import score
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.kv_cache import RunCache
from starling_engine.model_config.compressed import CompressedShape
from starling_engine.model_config.layer import Runs
from starling_engine.model_config.mla_shape import QuerySpan


class CompressedAttention:
    """The backend's place: what follows is called by the layers themselves, and has no kernels."""

    name = "torch"
    capturable = False
    cascades = False
    takes_query_blocks = False


@dataclass(slots=True)
class Compressor:
    """Parameters by which runs become entries: bias [rate, width] of the weights, by a token's place, and the norm of entries."""

    bias: torch.Tensor
    norm: Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class CompressedWeights:
    """Parameters of one layer's attention except its linear layers.

    num_heads    of this rank
    sinks        [num_heads] fp32: one more score of each head in the denominator alone
    cos_sin      as in `AttentionWeights`
    compressors  of entries, and of their keys for the indexer; none without runs
    """

    shape: CompressedShape
    runs: Runs | None
    window: int
    num_heads: int
    sinks: torch.Tensor
    cos_sin: torch.Tensor
    compressors: Sequence[Compressor]


@dataclass(slots=True)
class CompressedQuery:
    """Queries of a step: q [T, num_heads, head_dim] rotated, and the indexer's, where there is one.

    Those are index_q [T, heads, dim] rotated, and the weights of its heads, [T, heads] fp32.
    """

    q: torch.Tensor
    index_q: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None


def turn_last(x: torch.Tensor, table: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Rotates pairs in the last elements of x [..., heads, dim] by rows [..., columns] of the table, or back. The others stay."""
    cos, sin = (half.repeat_interleave(2, dim=-1).unsqueeze(-2) for half in table.chunk(2, dim=-1))
    still, turned = torch.split(x, [x.shape[-1] - table.shape[-1], table.shape[-1]], dim=-1)
    wide = turned.float()
    across = torch.stack([-wide[..., 1::2], wide[..., ::2]], dim=-1).flatten(-2)
    return torch.cat([still, (wide * cos + across * (-sin if back else sin)).to(x.dtype)], dim=-1)


def compress(inputs: torch.Tensor, runs: Runs, compressor: Compressor, *, first: bool) -> torch.Tensor:
    """Makes entries, not yet rotated, of whole runs: inputs [N, values and weights] -> [runs, width].

    Of runs that overlap the first one in `inputs` is there for the second one's sake, unless it is the sequence's `first`.
    """
    values, weights = (half.reshape(-1, runs.rate, half.shape[1]) for half in inputs.chunk(2, dim=-1))
    weights = weights + compressor.bias
    if runs.indexed:
        before, own = values.chunk(2, dim=-1)
        weights_before, weights_own = weights.chunk(2, dim=-1)
        if first:  # there is no run before it
            before = torch.cat([torch.zeros_like(before[:1]), before])
            weights_before = torch.cat([torch.full_like(weights_before[:1], float("-inf")), weights_before])
        else:
            own, weights_own = own[1:], weights_own[1:]
        values = torch.cat([before[:-1], own], dim=1)
        weights = torch.cat([weights_before[:-1], weights_own], dim=1)
    shares = weights.softmax(dim=1, dtype=torch.float32).to(values.dtype)
    return compressor.norm((values * shares).sum(dim=1))


def store_entries(layer: CompressedWeights, kv: RunCache, tables: torch.Tensor, meta: AttentionMetadata, span: QuerySpan) -> None:
    """Compresses the runs that the step completes in one sequence. Rows of its tokens are in the cache already."""
    shape, runs = layer.shape, layer.runs
    assert runs is not None, "a layer without runs has no entries"
    first, end = (span.context - span.queries) // runs.rate, span.context // runs.rate
    if first == end:
        return
    start = first - 1 if runs.indexed and first else first
    rows = rows_at(kv.window, meta.block_tables[span.row], start * runs.rate, end * runs.rate)[:, shape.head_dim :]
    at = torch.arange(first, end, device=rows.device)
    table, parts = layer.cos_sin[at * runs.rate], torch.split(rows, list(shape.input_sizes(runs)), dim=-1)
    made = [compress(x, runs, part, first=first == start) for x, part in zip(parts, layer.compressors, strict=True)]
    entries = torch.cat([turn_last(each.unsqueeze(1), table).squeeze(1) for each in made], dim=-1)
    blocks, places = _places_of_runs(at, runs.rate, kv, tables[span.row])
    kv.entries[blocks, places] = entries


def attend(
    query: CompressedQuery,
    layer: CompressedWeights,
    kv: torch.Tensor | RunCache,
    tables: torch.Tensor | None,
    meta: AttentionMetadata,
    span: QuerySpan,
    out: torch.Tensor,
) -> None:
    """Fills the rows of one sequence in `out` [T, num_heads, head_dim], whose rows and entries are in the cache."""
    shape, before = layer.shape, span.context - span.queries
    low, scale = max(0, before - layer.window + 1), shape.head_dim**-0.5
    window = kv.window if isinstance(kv, RunCache) else kv
    rows = rows_at(window[..., : shape.head_dim], meta.block_tables[span.row], low, span.context)
    entries = None if layer.runs is None else _entries(layer.shape, layer.runs, kv, tables, span)
    read, own = (0, 0) if entries is None else (entries.read, entries.read if entries.keys is not None else 0)
    step = shape.rows_at_once(layer.num_heads, layer.window, read, own)
    for start in range(0, span.queries, step):
        end = min(start + step, span.queries)
        tokens = slice(span.start + start, span.start + end)
        positions = torch.arange(before + start, before + end, device=rows.device)
        q, keys = query.q[tokens], rows[max(0, before + start - layer.window + 1) - low : before + end - low]
        behind = positions[:, None] - torch.arange(before + end - len(keys), before + end, device=rows.device)
        scores, values = [_masked(q @ keys.T, (behind >= 0) & (behind < layer.window))], keys[:0]
        if entries is not None:
            values, seen = entries.seen_by(query, tokens, positions)
            scores.append(_masked(q @ values.transpose(-1, -2), seen))
        sinks = layer.sinks[None, :, None].expand(len(q), -1, -1)
        shares = torch.cat([*(each.float() * scale for each in scores), sinks], dim=-1).softmax(dim=-1).to(q.dtype)
        of_window, of_entries, _ = torch.split(shares, [len(keys), values.shape[-2], 1], dim=-1)
        out[tokens] = of_window @ keys + of_entries @ values


@dataclass(slots=True)
class _Entries:
    """Entries of a sequence's complete runs: `blocks` and `places` in the cache, which attention reads `read` of at a time.

    Either all of them are in `values` [N, head_dim], or an indexer chooses by their `keys` [N, dim].
    """

    shape: CompressedShape
    rate: int
    cache: torch.Tensor
    blocks: torch.Tensor
    places: torch.Tensor
    read: int
    values: torch.Tensor
    keys: torch.Tensor | None = None

    def seen_by(self, query: CompressedQuery, tokens: slice, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns entries [N, head_dim], or others for each of some tokens, [M, top, head_dim]; and which each sees, [M, N]."""
        seen = torch.arange(len(self.blocks), device=positions.device) < ((positions + 1) // self.rate)[:, None]
        if self.keys is None:
            return self.values, seen
        assert query.index_q is not None and query.index_weights is not None, "an indexer has queries"
        index = self.shape.index
        weights = query.index_weights[tokens] * (index.dim * index.num_heads) ** -0.5
        scores = score(query.index_q[tokens], weights, self.keys, index).masked_fill_(~seen, float("-inf"))
        best = scores.topk(self.read, sorted=False)
        return self.cache[self.blocks[best.indices], self.places[best.indices]], best.values > float("-inf")


def _entries(
    shape: CompressedShape, runs: Runs, kv: torch.Tensor | RunCache, tables: torch.Tensor | None, span: QuerySpan
) -> _Entries | None:
    """Returns the entries of one sequence; None where no run is complete."""
    assert isinstance(kv, RunCache) and tables is not None, "a layer with runs has entries"
    count = span.context // runs.rate
    if not count:
        return None
    blocks, places = _places_of_runs(torch.arange(count, device=kv.entries.device), runs.rate, kv, tables[span.row])
    cache, keys = torch.split(kv.entries, [shape.head_dim, kv.entries.shape[-1] - shape.head_dim], dim=-1)
    if runs.indexed and count > shape.index.top:
        return _Entries(shape, runs.rate, cache, blocks, places, shape.index.top, cache[0, :0], keys[blocks, places])
    return _Entries(shape, runs.rate, cache, blocks, places, count, cache[blocks, places])


def _masked(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Hides keys in scores [M, heads, N] that a token does not see, by seen [M, N]."""
    return scores.masked_fill_(~seen[:, None], float("-inf"))


def rows_at(kv: torch.Tensor, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Returns the rows of the tokens from `start` to `end` of a sequence, [end - start, width]."""
    at = torch.arange(start, end, device=kv.device)
    return kv[table[at // kv.shape[1]].long(), at % kv.shape[1]]


def _places_of_runs(at: torch.Tensor, rate: int, kv: RunCache, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the blocks of runs by their numbers `at`, and their places in these: where the last token of each is."""
    last = at * rate + rate - 1
    return table[last // kv.window.shape[1]].long(), at % kv.entries.shape[1]
