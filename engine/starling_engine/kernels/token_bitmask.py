"""Masks: sets the logits of forbidden tokens to -inf, in place. A tile in which all tokens are allowed is not touched."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BITS = tl.constexpr(32)
TILE_WORDS = tl.constexpr(64)
WARPS = 8  # 8 logits a thread: two loads and two stores of 16 bytes each


@triton.jit
def _apply(logits, stride, rows, words, mask_words, vocab):
    """Program (m, part): the tokens of TILE_WORDS words of the m-th mask."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    word = tl.load(words + m * mask_words + at, mask=at < mask_words, other=-1)
    if tl.min((word == -1).to(tl.int32), 0) == 1:
        return
    bit = tl.arange(0, BITS)
    token = at[:, None] * BITS + bit[None, :]
    own = logits + tl.load(rows + m) * stride + token
    # Reading the logits lets whole registers be written: bits alone would make it one logit at a time.
    x = tl.load(own, mask=token < vocab, other=0.0)
    tl.store(own, tl.where((word[:, None] >> bit[None, :]) & 1 != 0, x, float("-inf")), mask=token < vocab)


def apply_token_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Does the same as `native.reference.apply_token_bitmask`. Moves 8 bytes for each logit of a tile with a forbidden token."""
    vocab, mask_words = logits.shape[1], words.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert rows.dtype == torch.int64 and rows.is_contiguous()
    assert words.dtype == torch.int32 and words.is_contiguous() and len(words) == len(rows) and mask_words * 32 >= vocab
    if len(rows):
        grid = len(rows), triton.cdiv(vocab, BITS.value * TILE_WORDS.value)
        _apply[grid](logits, logits.stride(0), rows, words, mask_words, vocab, num_warps=WARPS)
