"""Penalties, bans and the minimum length: rows of logits are read, adjusted by a word for each token, and written to new rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels import token_words as layout

PROMPT, NEVER, ENDS = tl.constexpr(layout.PROMPT), tl.constexpr(layout.NEVER), tl.constexpr(layout.ENDS)
COUNT_SHIFT = tl.constexpr(layout.COUNT_SHIFT)
TILE = tl.constexpr(2048)
WARPS = 8  # 8 logits a thread: two loads of 16 bytes each of logits and of words


@triton.jit
def _adjust(logits, stride, rows, words, slots, penalties, short, out, vocab):
    """Program (row, part): tokens [part * TILE, + TILE) of one row."""
    r = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = token < vocab
    repetition, presence = tl.load(penalties + 3 * r), tl.load(penalties + 3 * r + 1)
    frequency, may_not_end = tl.load(penalties + 3 * r + 2), tl.load(short + r) != 0
    x = tl.load(logits + tl.load(rows + r) * stride + token, mask=here, other=0.0)
    word = tl.load(words + tl.load(slots + r) * vocab + token, mask=here, other=0)
    times = word >> COUNT_SHIFT
    seen = (times > 0) | ((word & PROMPT) != 0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = tl.where(times > 0, x - (presence + frequency * times.to(tl.float32)), x)
    never = ((word & NEVER) != 0) | (((word & ENDS) != 0) & may_not_end)
    tl.store(out + r * vocab + token, tl.where(never, float("-inf"), x), mask=here)


def adjust(logits: Tensor, rows: Tensor, words: Tensor, slots: Tensor, penalties: Tensor, short: Tensor) -> Tensor:
    """Gives the same as `kernels.token_words.adjust`, to the bit. Moves 12 bytes for each logit of a row."""
    count, vocab = len(rows), logits.shape[1]
    assert logits.dtype == penalties.dtype == torch.float32 and words.dtype == torch.int32 and short.dtype == torch.bool
    assert rows.dtype == slots.dtype == torch.int64 and logits.stride(1) == 1 and words.is_contiguous()
    assert penalties.shape == (count, 3) and penalties.is_contiguous() and len(slots) == len(short) == count
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    if count:
        _adjust[(count, triton.cdiv(vocab, TILE.value))](
            logits,
            logits.stride(0),
            rows,
            words,
            slots,
            penalties,
            short,
            out,
            vocab,
            num_warps=WARPS,
            enable_fp_fusion=False,  # rounded where the reference rounds
        )
    return out
