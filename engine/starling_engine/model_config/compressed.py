"""Compressed attention (DeepSeek-V4) as a config describes it: sizes, and names of tensors.

A query sees the last tokens one by one, and runs of all earlier ones as an entry each. One row of a token is its key and its value,
for all heads.
"""

from dataclasses import dataclass

from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import Runs
from starling_engine.model_config.mla_shape import SCRATCH, IndexShape

QUERY_ROWS = 64
"""Queries that attend at once, at most."""


@dataclass(frozen=True, kw_only=True)
class CompressedShape:
    """Sizes in elements.

    num_heads  of queries, each of head_dim; the last `rope_dim` of these are rotated, pairs side by side
    q_rank     of the compressed queries
    groups     of heads whose outputs are projected together, each to `group_rank` elements
    index      of the indexer in layers whose runs are `indexed`: its keys are compressed as the entries are
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    groups: int
    group_rank: int
    index: IndexShape

    def compressed_sizes(self, runs: Runs | None) -> tuple[int, ...]:
        """Returns the elements of what a run becomes: its entry, and its key for the indexer."""
        if runs is None:
            return ()
        return (self.head_dim, self.index.dim) if runs.indexed else (self.head_dim,)

    def entry_size(self, runs: Runs) -> int:
        """Returns the elements of an entry in the cache, the indexer's key behind it."""
        return sum(self.compressed_sizes(runs))

    def input_sizes(self, runs: Runs | None) -> tuple[int, ...]:
        """Returns the elements of a token's part in each of them, as many of which are values as weights.

        Where runs overlap, a token has a part in two entries.
        """
        overlap = 2 if runs is not None and runs.indexed else 1
        return tuple(2 * overlap * size for size in self.compressed_sizes(runs))

    def row_size(self, runs: Runs | None) -> int:
        """Returns the elements of a token's row in the cache."""
        return self.head_dim + sum(self.input_sizes(runs))

    def rows_at_once(self, heads: int, window: int, entries: int, own: int) -> int:
        """Returns the queries that attend at once to a window and to so many entries, of which `own` are others for each query.

        Scores are there in fp32, with a copy.
        """
        return max(1, min(QUERY_ROWS, SCRATCH // (4 * heads * (window + QUERY_ROWS + entries) + own * self.head_dim)))

    def scratch_elements(self, queries: int, context: int, window: int, runs: Runs | None) -> int:
        """Returns the most scratch of a layer in a step with at most `queries` tokens of sequences of at most `context`.

        That is rows of the window, entries while they are made in fp32, those that are read or their keys, and scores.
        """
        seen = min(context, window + queries)
        if runs is None:
            return seen * self.head_dim + max(SCRATCH, 4 * self.num_heads * (window + QUERY_ROWS))
        entries = context // runs.rate
        made = (queries + runs.span) * sum(self.input_sizes(runs)) * 4
        chooses = runs.indexed and entries > self.index.top
        read = entries * (self.index.dim if chooses else self.head_dim)
        chosen = self.index.top if chooses else entries
        scores = 4 * self.num_heads * (window + QUERY_ROWS + chosen) + (chosen * self.head_dim if chooses else 0)
        index = self.index.scratch_elements(queries, entries) if chooses else 0
        return seen * self.row_size(runs) + made + read + max(SCRATCH, scores) + index


@dataclass(frozen=True, kw_only=True)
class CompressedNames:
    """Names of the modules in a checkpoint; see `TensorNames`. `sinks` and `bias` are a tensor's whole name.

    What compresses runs is below `compressor`, and for the indexer's keys below `index_compressor`. There are `values`, `weights`,
    a `bias` of the weights by a token's place in its run, and a `norm` of entries.
    """

    q_a: str = "attn.wq_a"
    q_a_norm: str = "attn.q_norm"
    q_b: str = "attn.wq_b"
    kv: str = "attn.wkv"
    kv_norm: str = "attn.kv_norm"
    other_kv_norm: str = "attn.norm"
    o_a: str = "attn.wo_a"
    o_b: str = "attn.wo_b"
    sinks: str = "attn.attn_sink"
    compressor: str = "attn.compressor"
    index_compressor: str = "attn.indexer.compressor"
    index_q: str = "attn.indexer.wq_b"
    index_weights: str = "attn.indexer.weights_proj"
    values: str = "wkv"
    weights: str = "wgate"
    bias: str = "ape"
    norm: str = "norm"


def no_compression(_config: Fields, _num_heads: int) -> CompressedShape | None:
    """Returns None, for a family that caches each token."""
    return None
