"""Ends a step in one launch: takes each sample's token from the parts of its draw, and accepts drafts by them."""

import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.sample import Drawn, best_of_parts


@triton.jit(do_not_specialize=["parts"])
def _accept(
    out, values, tokens, parts, logits, stride, ids, sampled, sampled_slots, ends, first, num_drafts, last, lengths,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): one that is sampled from, whose samples lie one behind the other. Padding is the first row once more."""
    row = tl.program_id(0)
    start = tl.load(first + row)
    newest, following, holds = start, start, tl.full((), 1, tl.int32)
    chosen = following
    for sample in range(start, start + tl.load(num_drafts + row) + 1):
        if DRAWN:
            token = best_of_parts(values, tokens, sample, parts, BLOCK)
            tl.store(out + 3 * sample, token)
            logit = tl.load(logits + sample * stride + token)
            tl.store(out + 3 * sample + 1, logit.to(tl.int32, bitcast=True).to(tl.int64))
        else:
            token = tl.load(out + 3 * sample)
        following = tl.load(ids + tl.load(sampled + sample) + 1)
        tl.store(out + 3 * sample + 2, following)
        chosen = tl.where(holds != 0, token, chosen)
        newest = tl.where(holds != 0, sample, newest)
        holds = holds & (token == following).to(tl.int32)
    slot = tl.load(sampled_slots + newest)
    tl.store(last + slot, chosen)
    tl.store(lengths + slot, tl.load(ends + newest) + 1)


def accept(
    out: Tensor,
    drawn: Drawn | None,
    *,
    ids: Tensor,
    sampled: Tensor,
    sampled_slots: Tensor,
    ends: Tensor,
    first: Tensor,
    num_drafts: Tensor,
    last: Tensor,
    lengths: Tensor,
) -> None:
    """Does what `worker.device.device_positions` does in torch; arguments have the names and shapes that they have there.

    Fills `out` [S, 3] int64, as `DeviceSampler.out`, for the samples of all rows. Without `drawn` its tokens and logits are there.
    """
    assert out.is_contiguous() and ids.is_contiguous()
    # Where nothing is drawn, any tensor stands for what is not read.
    values, tokens, logits = (out, out, out) if drawn is None else (drawn.values, drawn.tokens, drawn.logits)
    _accept[(len(first),)](
        out,
        values,
        tokens,
        values.shape[1],
        logits,
        logits.stride(0),
        ids,
        sampled,
        sampled_slots,
        ends,
        first,
        num_drafts,
        last,
        lengths,
        DRAWN=drawn is not None,
        BLOCK=1 if drawn is None else drawn.block,
        num_warps=1,
    )
