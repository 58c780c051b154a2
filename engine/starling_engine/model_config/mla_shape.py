"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): its sizes, and which of its two forms costs less.

Imports no torch, so that memory can be planned without it.

The cache holds one latent a token for all heads: the compressed keys and values `c` and a rotated part of the key. The two forms:

    expanded   k = [W_UK c, rotated part] and v = W_UV c are made for every cached token, then attention runs as ever
    absorbed   W_UK goes to the query and W_UV to the output, and attention runs on the latents themselves

With an indexer (DeepSeek-V3.2's sparse attention, arXiv 2512.02556, section 2.1) a query attends to the tokens with the best scores
alone. Absorbed, it reads the latents of these; expanded, all others are masked. Contexts of no more tokens are attended whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION_COST = 4
"""Cost of a multiplication inside attention, relative to a plain matrix product: measured in bfloat16 by bench/mla.py."""

SCRATCH = 1 << 24
"""Elements that a layer's attention takes at once beside its inputs and outputs.

A single sequence (a single head in the expanded form) may take more by itself.
"""

MASK = 4
"""Elements that a mask takes for each query and key: torch turns a mask of bool into the model's dtype, and that into fp32."""

QUERY_ROWS = 256
"""Queries that attend at once in the expanded form: the mask stays small, and keys behind the last one are left out."""

SCORED_ROWS = 64
"""Queries that an indexer scores at once, at most."""


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """Sizes of an indexer, in elements.

    num_heads    its heads, which share one key a token: each has a score, and they are added up by weights
    dim          of a head; the model's rotated part comes first in it
    top          tokens that a query attends to, at most
    interleaved  its rotated parts hold pairs side by side, not in two halves
    """

    num_heads: int
    dim: int
    top: int
    interleaved: bool

    def rows_at_once(self, context: int) -> int:
        """Returns the queries that are scored at once against `context` keys."""
        return max(1, min(SCORED_ROWS, SCRATCH // (4 * context)))

    def keys_at_once(self, rows: int) -> int:
        """Returns the keys that so many queries are scored against at once."""
        return max(256, SCRATCH // (2 * rows * self.num_heads))

    def scratch_elements(self, queries: int, context: int) -> int:
        """Returns the most scratch of the scores and of what is chosen, for `queries` tokens of sequences of at most `context`.

        That is keys as they are cached. In fp32 it is some of them, queries while they are rotated, scores of each head, and sums.
        The choice has 4 bytes a token, and 8 while it is made. An element has 2 bytes at least.
        """
        if context <= self.top:
            return 0
        rows, best = self.rows_at_once(context), min(self.top, context)
        keys = min(context, self.keys_at_once(rows))
        scores = 2 * rows * (self.num_heads * (keys + 4 * self.dim) + 2 * context + 3 * best)
        return context * self.dim + 2 * keys * self.dim + scores + 2 * queries * best


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Sizes in elements.

    q_rank      of the compressed queries; 0 means that queries are not compressed
    kv_rank     of the compressed keys and values
    nope_dim    part of a query or key head without rotation; `rope_dim` the rotated part, whose key all heads share
    value_dim   of a value head
    interleaved the checkpoint's rotated parts hold pairs side by side, not in two halves
    index       of the indexer that chooses the tokens to attend to; None: all are
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    index: IndexShape | None = None

    @property
    def key_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of a latent."""
        return self.kv_rank + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Width of a cached token: its latent, and behind it the indexer's key."""
        return self.latent_dim + (self.index.dim if self.index is not None else 0)

    @property
    def expanded_dim(self) -> int:
        """Width of keys and values of the expanded form. Torch's fused kernel needs both alike, so the narrower is padded."""
        return max(self.key_dim, self.value_dim)

    def most_absorbed(self, context: int) -> int:
        """Returns the most queries that attend to `context` tokens at no more cost in the absorbed form than in the expanded one.

        Absorbed, a head multiplies 2 * latent_dim times for each query and key. W_UK and W_UV cost kv_rank * (nope_dim + value_dim)
        for each query. Expanded, it is 2 * expanded_dim for each query and key, and the matrices cost the same for each key. Of
        chosen tokens the absorbed form alone multiplies no others.
        """
        through = self.kv_rank * (self.nope_dim + self.value_dim)
        extra = ATTENTION_COST * 2 * max(0, self.attended(context) * self.latent_dim - context * self.expanded_dim)
        return context * through // (extra + through)

    def attended(self, context: int) -> int:
        """Returns the tokens of `context` that a query attends to."""
        return context if self.index is None else min(context, self.index.top)

    def is_chosen(self, context: int) -> bool:
        """Says if a query with `context` tokens attends to chosen ones alone."""
        return self.attended(context) < context

    def absorbed_elements(self, queries: int, context: int) -> int:
        """Returns the scratch of one sequence in the absorbed form: latents, queries and outputs of their width, and the mask."""
        heads = 3 * queries * self.num_heads * self.latent_dim
        return context * self.latent_dim + heads + MASK * queries * context

    def chosen_elements(self) -> int:
        """Returns the scratch of a query that attends to chosen tokens in the absorbed form."""
        assert self.index is not None, "there is no choice without an indexer"
        return self.absorbed_elements(1, self.index.top) + 2 * MASK * self.index.top

    def chosen_at_once(self) -> int:
        """Returns the number of queries that do so at once."""
        return max(1, SCRATCH // self.chosen_elements())

    def expanded_elements(self, heads: int, context: int) -> int:
        """Returns the scratch of one sequence in the expanded form, `heads` at once: latents, keys and values twice, mask."""
        width = self.nope_dim + self.value_dim + 2 * self.expanded_dim
        return context * (self.latent_dim + heads * width + MASK * QUERY_ROWS)

    def heads_at_once(self, context: int) -> int:
        """Returns the number of heads that are expanded at once."""
        spare = SCRATCH - self.expanded_elements(0, context)
        one = self.expanded_elements(1, context) - self.expanded_elements(0, context)
        return min(self.num_heads, max(1, spare // one))

    def scratch_elements(self, queries: int, context: int) -> int:
        """Returns the most scratch of a step with at most `queries` tokens, and sequences of at most `context`."""
        whole = self.attended(context)
        absorbed = min(queries, self.most_absorbed(whole))
        most = max(SCRATCH, self.absorbed_elements(absorbed, whole), self.expanded_elements(1, context))
        if self.index is None:
            return most
        return max(most, self.chosen_elements()) + self.index.scratch_elements(queries, context)


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Queries of one sequence in a step, and the tokens that they attend to.

    row      the sequence's row of the block tables
    start    the first of its `queries` tokens on the flat token axis
    context  tokens that they attend to, themselves included
    """

    row: int
    start: int
    queries: int
    context: int


def spans(query_start: Sequence[int], context_lens: Sequence[int]) -> list[QuerySpan]:
    """Returns the sequences that have tokens in a step; arguments as in `AttentionMetadata`."""
    ends = zip(query_start, query_start[1:], context_lens, strict=False)
    return [QuerySpan(row, start, end - start, context) for row, (start, end, context) in enumerate(ends) if end > start]


@dataclass(frozen=True, slots=True)
class FormPlan:
    """Sequences that attend in the absorbed form, in batches, and those that attend in the expanded one, one by one.

    Those that attend to chosen tokens in the absorbed form are `chosen`.
    """

    absorbed: list[list[QuerySpan]]
    expanded: list[QuerySpan]
    chosen: list[QuerySpan]


def plan_forms(step: Sequence[QuerySpan], shape: MlaShape) -> FormPlan:
    """Chooses each sequence's form.

    Sequences of a batch have equally many queries, and are padded to the longest context, that of the last one. So sequences of
    similar length share a batch, as many as fit into SCRATCH.
    """
    expanded = [span for span in step if span.queries > shape.most_absorbed(span.context)]
    absorbed = [span for span in step if span.queries <= shape.most_absorbed(span.context)]
    chosen = [span for span in absorbed if shape.is_chosen(span.context)]
    whole = [span for span in absorbed if not shape.is_chosen(span.context)]
    batches: list[list[QuerySpan]] = []
    for span in sorted(whole, key=lambda span: (span.queries, span.context)):
        room = SCRATCH // shape.absorbed_elements(span.queries, span.context)
        if batches and batches[-1][0].queries == span.queries and len(batches[-1]) < room:
            batches[-1].append(span)
        else:
            batches.append([span])
    return FormPlan(batches, expanded, chosen)
