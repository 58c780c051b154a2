"""Penalties, banned tokens and min_tokens: copies rows of logits, adjusted by the token words of `kernels/token_words.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels import token_words as layout

PROMPT, BANNED, STOP = tl.constexpr(layout.PROMPT), tl.constexpr(layout.BANNED), tl.constexpr(layout.STOP)
COUNT_SHIFT = tl.constexpr(layout.COUNT_SHIFT)
TILE = tl.constexpr(2048)
WARPS = 8  # 8 logits a thread: two loads of 16 bytes each of logits and of words


@triton.jit
def _adjust(logits, stride, rows, words, slots, penalties, below_min_tokens, out, vocab):
    """Program (row, part): tokens [part * TILE, + TILE) of one row."""
    r = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = token < vocab
    repetition, presence = tl.load(penalties + 3 * r), tl.load(penalties + 3 * r + 1)
    frequency, may_not_end = tl.load(penalties + 3 * r + 2), tl.load(below_min_tokens + r) != 0
    x = tl.load(logits + tl.load(rows + r) * stride + token, mask=here, other=0.0)
    word = tl.load(words + tl.load(slots + r) * vocab + token, mask=here, other=0)
    output_count = word >> COUNT_SHIFT
    seen = (output_count > 0) | ((word & PROMPT) != 0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = tl.where(output_count > 0, x - (presence + frequency * output_count.to(tl.float32)), x)
    masked = ((word & BANNED) != 0) | (((word & STOP) != 0) & may_not_end)
    tl.store(out + r * vocab + token, tl.where(masked, float("-inf"), x), mask=here)


def adjust(logits: Tensor, rows: Tensor, words: Tensor, slots: Tensor, penalties: Tensor, below_min_tokens: Tensor) -> Tensor:
    """Gives bitwise the same as `kernels.token_words.adjust`. Moves 12 bytes for each logit of a row."""
    count, vocab = len(rows), logits.shape[1]
    assert logits.dtype == penalties.dtype == torch.float32 and words.dtype == torch.int32 and below_min_tokens.dtype == torch.bool
    assert rows.dtype == slots.dtype == torch.int64 and logits.stride(1) == 1 and words.is_contiguous()
    assert penalties.shape == (count, 3) and penalties.is_contiguous() and len(slots) == len(below_min_tokens) == count
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    if count:
        _adjust[(count, triton.cdiv(vocab, TILE.value))](
            logits,
            logits.stride(0),
            rows,
            words,
            slots,
            penalties,
            below_min_tokens,
            out,
            vocab,
            num_warps=WARPS,
            enable_fp_fusion=False,  # rounded where the reference rounds
        )
    return out
