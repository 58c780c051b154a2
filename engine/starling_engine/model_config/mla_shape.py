"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): its sizes, and which of its two forms costs less.

Imports no torch, so that memory can be planned without it.

The cache holds one latent a token for all heads: the compressed keys and values `c` and a rotated part of the key. The two forms:

    expanded   k = [W_UK c, rotated part] and v = W_UV c are made for every cached token, then attention runs as ever
    absorbed   W_UK goes to the query and W_UV to the output, and attention runs on the latents themselves
"""

from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION_COST = 4
"""What a multiplication inside attention costs, in those of a plain matrix product: measured in bfloat16 by bench/mla.py."""

SCRATCH = 1 << 24
"""Elements that a layer's attention takes at once beside its inputs and outputs, unless a single sequence (a single head, where
expanded) takes more by itself."""

MASK = 4
"""Elements that a mask takes for each query and key: torch turns one of bool into the model's dtype, and that into fp32."""

QUERY_ROWS = 256
"""Queries that attend at once in the expanded form: the mask stays small, and keys after the last of them are left out."""


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
        """Width of what is cached of a token."""
        return self.kv_rank + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Width of keys and values of the expanded form: torch's fused kernel wants both alike, the narrower is padded."""
        return max(self.key_dim, self.value_dim)

    def most_absorbed(self, context: int) -> int:
        """The most queries that attend to `context` tokens at no more cost in the absorbed form than in the expanded.

        Absorbed, a head multiplies 2 * latent_dim times for each query and key, and kv_rank * (nope_dim + value_dim) times for each
        query, to go through W_UK and W_UV. Expanded it is 2 * expanded_dim for each query and key, and the same way for each key.
        """
        through = self.kv_rank * (self.nope_dim + self.value_dim)
        extra = ATTENTION_COST * 2 * max(0, self.latent_dim - self.expanded_dim)
        return context * through // (context * extra + through)

    def absorbed_elements(self, queries: int, context: int) -> int:
        """Scratch of one sequence in the absorbed form: latents, queries and outputs of their width, and the mask."""
        heads = 3 * queries * self.num_heads * self.latent_dim
        return context * self.latent_dim + heads + MASK * queries * context

    def expanded_elements(self, heads: int, context: int) -> int:
        """Scratch of one sequence in the expanded form, `heads` at once: latents, keys and values twice, mask."""
        width = self.nope_dim + self.value_dim + 2 * self.expanded_dim
        return context * (self.latent_dim + heads * width + MASK * QUERY_ROWS)

    def heads_at_once(self, context: int) -> int:
        """Heads that are expanded together."""
        spare = SCRATCH - self.expanded_elements(0, context)
        one = self.expanded_elements(1, context) - self.expanded_elements(0, context)
        return min(self.num_heads, max(1, spare // one))

    def scratch_elements(self, queries: int, context: int) -> int:
        """The most that a step of at most `queries` tokens takes, with sequences of at most `context`."""
        absorbed = min(queries, self.most_absorbed(context))
        return max(SCRATCH, self.absorbed_elements(absorbed, context), self.expanded_elements(1, context))


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """One sequence's part of a step: row `row` of the block tables, `queries` tokens from `start` of the flat token axis, attending
    to `context` tokens, themselves included."""

    row: int
    start: int
    queries: int
    context: int


def spans(query_start: Sequence[int], context_lens: Sequence[int]) -> list[QuerySpan]:
    """The sequences of a step that have tokens in it; arguments as in `AttentionMetadata`."""
    ends = zip(query_start, query_start[1:], context_lens, strict=False)
    return [QuerySpan(row, start, end - start, context) for row, (start, end, context) in enumerate(ends) if end > start]


@dataclass(frozen=True, slots=True)
class FormPlan:
    """Sequences that attend in the absorbed form, in batches, and those that attend in the expanded one, one by one."""

    absorbed: list[list[QuerySpan]]
    expanded: list[QuerySpan]


def plan_forms(step: Sequence[QuerySpan], shape: MlaShape) -> FormPlan:
    """Chooses each sequence's form.

    Sequences of a batch have equally many queries and are padded to the longest context, its last; so neighbours in length go
    together, as many as fit into SCRATCH.
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
