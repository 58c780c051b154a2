"""Multi-head latent attention on a GPU, by Triton's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from starling_engine.attention.mla_base import MlaBackend, MlaWeights
from starling_engine.kernels import mla, mla_expanded
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import QueryBlocks
from starling_engine.kernels.mla_store import rotate_and_store
from starling_engine.model_config.mla_shape import SCRATCH, MlaShape, QuerySpan, spans
from starling_engine.platforms.triton_support import sms

SHORT = 32
"""Most queries of a sequence that always take the absorbed form: the expanded one's launches would take longer than the work."""


class TritonMla(MlaBackend):
    """Needs `triton_runs`. Chooses the form of each sequence.

    Steps of one token a sequence take the absorbed form, so that shapes alone decide and graphs can hold them. In other steps a
    sequence that is long enough takes the expanded form, if the host knows its length.
    """

    name = "triton"
    capturable = True
    cascades = False
    takes_query_blocks = True

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
        heads = q.view(len(q), shape.num_heads, shape.key_dim)
        q_rope = rotate_and_store(
            heads, c, k_rope, meta.positions, layer.cos_sin, kv, meta.slot_mapping, interleaved=shape.interleaved
        )
        nope = heads[..., : shape.nope_dim]
        out = q.new_empty(len(q), shape.num_heads, shape.value_dim)
        if meta.max_query_len == 1 or meta.host_lens is None:
            attend_absorbed(nope, q_rope, layer, kv, meta, out)
            return out.flatten(1)
        plan = plan_runs(spans(*meta.host_lens), shape, QueryBlocks.of_latents(shape.num_heads, q.itemsize))
        for run in plan.absorbed:
            own = slice(run.start, run.stop)
            attend_absorbed(nope[own], q_rope[own], layer, kv, run.of(meta), out[own], run.first_row)
        for span in plan.expanded:
            attend_expanded(nope, q_rope, layer, kv, meta, span, out)
        return out.flatten(1)


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """Neighbouring sequences `first_row` to `last_row` of a step: tokens `start` to `stop`, at most `longest` of each.

    Their query blocks are `first_block` to `stop_block` of the step's list.
    """

    first_row: int
    last_row: int
    start: int
    stop: int
    longest: int
    first_block: int
    stop_block: int

    def of(self, meta: AttentionMetadata) -> AttentionMetadata:
        """Returns their part of the step, as a step of its own; but query blocks still name the whole step's sequences."""
        rows, tokens = slice(self.first_row, self.last_row + 1), slice(self.start, self.stop)
        starts = meta.query_start[self.first_row : self.last_row + 2] - self.start
        return AttentionMetadata(
            meta.positions[tokens],
            meta.slot_mapping[tokens],
            starts,
            meta.context_lens[rows],
            meta.block_tables[rows],
            self.longest,
            query_blocks=None if meta.query_blocks is None else meta.query_blocks[self.first_block : self.stop_block],
        )


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Sequences that attend in the absorbed form, in runs, and those that attend in the expanded form, one by one."""

    absorbed: list[SequenceRun]
    expanded: list[QuerySpan]


def plan_runs(step: Sequence[QuerySpan], shape: MlaShape, blocks: QueryBlocks) -> RunPlan:
    """Chooses each sequence's form. Absorbed ones between two expanded ones are a run, so that nothing has to be gathered."""
    plan, stop_block = RunPlan([], []), 0
    for span in step:
        first_block, stop_block = stop_block, stop_block + blocks.of_length(span.queries)
        if span.queries > max(SHORT, shape.most_absorbed(span.context)):
            plan.expanded.append(span)
            continue
        run = SequenceRun(span.row, span.row, span.start, span.start + span.queries, span.queries, first_block, stop_block)
        if plan.absorbed and plan.absorbed[-1].stop == span.start:
            last = plan.absorbed.pop()
            longest = max(last.longest, span.queries)
            run = SequenceRun(last.first_row, span.row, last.start, run.stop, longest, last.first_block, stop_block)
        plan.absorbed.append(run)
    return plan


def attend_absorbed(
    nope: torch.Tensor,
    q_rope: torch.Tensor,
    layer: MlaWeights,
    kv: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    first_sequence: int = 0,
) -> None:
    """nope [T, H, nope_dim], q_rope [T, H, rope_dim] -> out [T, H, value_dim]."""
    q_latent = torch.bmm(nope.transpose(0, 1), layer.w_uk)
    attended = mla.attend(q_latent, q_rope, kv, meta, layer.scale, sms=sms(kv.device), first_sequence=first_sequence)
    out.copy_(torch.bmm(attended, layer.w_uv.transpose(1, 2)).transpose(0, 1))


def attend_expanded(
    nope: torch.Tensor,
    q_rope: torch.Tensor,
    layer: MlaWeights,
    kv: torch.Tensor,
    meta: AttentionMetadata,
    span: QuerySpan,
    out: torch.Tensor,
) -> None:
    """Fills the rows of one sequence in `out` [T, H, value_dim], as many heads at a time as fit into SCRATCH."""
    shape, own, context = layer.shape, slice(span.start, span.start + span.queries), span.context
    blocks = meta.block_tables[span.row, : -(-context // kv.shape[1])]
    latents = kv[blocks.long()].flatten(0, 1)[:context]
    c, k_rope = torch.split(latents, [shape.kv_rank, shape.rope_dim], dim=-1)
    step = max(1, SCRATCH // (context * (shape.nope_dim + shape.value_dim)))
    for first in range(0, shape.num_heads, step):
        heads = slice(first, min(first + step, shape.num_heads))
        k, v = (F.linear(c, w[heads].flatten(0, 1)).view(context, -1, w.shape[1]) for w in (layer.w_uk, layer.w_uv))
        mla_expanded.attend(nope[own, heads], q_rope[own, heads], k, k_rope, v, layer.scale, out[own, heads])
