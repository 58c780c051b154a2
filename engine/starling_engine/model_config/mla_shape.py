"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): its sizes, and which of its two forms costs less.

Imports no torch, so that memory can be planned without it.

The cache holds one latent a token for all heads: the compressed keys and values `c` and a rotated part of the key. The two forms:

    expanded   k = [W_UK c, rotated part] and v = W_UV c are made for every cached token, then attention runs as ever
    absorbed   W_UK goes to the query and W_UV to the output, and attention runs on the latents themselves
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


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Sizes in elements.

    q_rank      of the compressed queries; 0 means that queries are not compressed
    kv_rank     of the compressed keys and values
    nope_dim    part of a query or key head without rotation; `rope_dim` the rotated part, whose key all heads share
    value_dim   of a value head
    interleaved the checkpoint's rotated parts hold pairs side by side, not in two halves
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def key_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached token."""
        return self.kv_rank + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Width of keys and values of the expanded form. Torch's fused kernel needs both alike, so the narrower is padded."""
        return max(self.key_dim, self.value_dim)

    def most_absorbed(self, context: int) -> int:
        """Returns the most queries that attend to `context` tokens at no more cost in the absorbed form than in the expanded one.

        Absorbed, a head multiplies 2 * latent_dim times for each query and key. W_UK and W_UV cost kv_rank * (nope_dim + value_dim)
        for each query. Expanded, it is 2 * expanded_dim for each query and key, and the matrices cost the same for each key.
        """
        through = self.kv_rank * (self.nope_dim + self.value_dim)
        extra = ATTENTION_COST * 2 * max(0, self.latent_dim - self.expanded_dim)
        return context * through // (context * extra + through)

    def absorbed_elements(self, queries: int, context: int) -> int:
        """Returns the scratch of one sequence in the absorbed form: latents, queries and outputs of their width, and the mask."""
        heads = 3 * queries * self.num_heads * self.latent_dim
        return context * self.latent_dim + heads + MASK * queries * context

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
        absorbed = min(queries, self.most_absorbed(context))
        return max(SCRATCH, self.absorbed_elements(absorbed, context), self.expanded_elements(1, context))


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
    """Sequences that attend in the absorbed form, in batches, and those that attend in the expanded one, one by one."""

    absorbed: list[list[QuerySpan]]
    expanded: list[QuerySpan]


def plan_forms(step: Sequence[QuerySpan], shape: MlaShape) -> FormPlan:
    """Chooses each sequence's form.

    Sequences of a batch have equally many queries, and are padded to the longest context, that of the last one. So sequences of
    similar length share a batch, as many as fit into SCRATCH.
    """
    expanded = [span for span in step if span.queries > shape.most_absorbed(span.context)]
    absorbed = [span for span in step if span.queries <= shape.most_absorbed(span.context)]
    batches: list[list[QuerySpan]] = []
    for span in sorted(absorbed, key=lambda span: (span.queries, span.context)):
        room = SCRATCH // shape.absorbed_elements(span.queries, span.context)
        if batches and batches[-1][0].queries == span.queries and len(batches[-1]) < room:
            batches[-1].append(span)
        else:
            batches.append([span])
    return FormPlan(batches, expanded)
