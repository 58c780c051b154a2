"""Penalties on tokens that a row has seen, from a history on the device: nothing of it comes from the host.

One kernel counts each row's tokens, another changes the logits of those counted and clears the counts again. Integers are added, so
the order does not matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

IN_PROMPT = tl.constexpr(1 << 30)  # a bit that no count of the output reaches
HISTORY = tl.constexpr(1024)
TILE = tl.constexpr(4096)
WARPS = 8


@triton.jit
def _settings(row, repetition, presence, frequency):
    """The row's penalties, and whether they change anything."""
    repeated, present, frequent = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    return repeated, present, frequent, (repeated != 1) | (present != 0) | (frequent != 0)


@triton.jit
def _count(tokens, stride, num_prompt, num_tokens, repetition, presence, frequency, counts, vocab):
    """How often the output has each token, and IN_PROMPT for those of the prompt."""
    row = tl.program_id(0).to(tl.int64)
    start, length = tl.program_id(1) * HISTORY, tl.load(num_tokens + row)
    _, _, _, penalised = _settings(row, repetition, presence, frequency)
    if (start >= length) | (penalised == 0):
        return
    at = start + tl.arange(0, HISTORY)
    token = tl.load(tokens + row * stride + at, mask=at < length, other=-1)
    # Placeholders of what is no text have no logit.
    here = (token >= 0) & (token < vocab)
    of_prompt = at < tl.load(num_prompt + row)
    tl.atomic_add(counts + row * vocab + token, 1, mask=here & (of_prompt == 0))
    tl.atomic_or(counts + row * vocab + token, IN_PROMPT, mask=here & of_prompt)


@triton.jit
def _penalise(logits, stride, counts, vocab, repetition, presence, frequency):
    row = tl.program_id(0).to(tl.int64)
    repeated, present, frequent, penalised = _settings(row, repetition, presence, frequency)
    if penalised == 0:
        return
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    count = tl.load(counts + row * vocab + token, mask=token < vocab, other=0)
    if tl.max(count, 0) == 0:
        return
    seen, times = count != 0, count & (IN_PROMPT - 1)
    logit = tl.load(logits + row * stride + token, mask=seen, other=0.0)
    logit = tl.where(logit > 0, tl.div_rn(logit, repeated), logit * repeated)
    logit -= tl.where(times > 0, present + frequent * times.to(tl.float32), 0.0)
    tl.store(logits + row * stride + token, logit, mask=seen)
    tl.store(counts + row * vocab + token, 0, mask=seen)


def penalise(
    logits: Tensor,
    tokens: Tensor,
    num_prompt: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    counts: Tensor,
) -> None:
    """Changes logits [S, V] fp32 in place, as `sampling.adjust.Adjuster` does with these penalties alone.

    Row s has seen tokens[s, :num_tokens[s]] ([S, L] int32), of which the first num_prompt[s] are its prompt (both [S] int32). The
    penalties repetition (1: none), presence and frequency (0: none) are [S] fp32. `counts` [S, V] int32 is working memory: zeros,
    before and after.

    Moves 4 V bytes for each row with a penalty, and 24 for each token that it has seen.
    """
    rows, vocab = logits.shape
    assert logits.dtype == repetition.dtype == presence.dtype == frequency.dtype == torch.float32
    assert tokens.dtype == num_prompt.dtype == num_tokens.dtype == counts.dtype == torch.int32
    assert logits.stride(1) == tokens.stride(1) == 1 and counts.is_contiguous() and counts.shape == logits.shape
    for column in (num_prompt, num_tokens, repetition, presence, frequency):
        assert column.shape == (rows,) and column.is_contiguous()
    if rows == 0:
        return
    penalties = (repetition, presence, frequency)
    history = triton.cdiv(tokens.shape[1], HISTORY.value)
    _count[(rows, history)](tokens, tokens.stride(0), num_prompt, num_tokens, *penalties, counts, vocab, num_warps=WARPS)
    _penalise[(rows, triton.cdiv(vocab, TILE.value))](logits, logits.stride(0), counts, vocab, *penalties, num_warps=WARPS)
