"""A word for each token of the vocabulary: what a request's adjustments have to know of the token, as a device keeps it.

So a device adjusts a row by what it has itself, and counts the tokens that it samples before the host knows of them.
"""

import numpy as np
import numpy.typing as npt
import torch

PROMPT, NEVER, ENDS = 1, 2, 4
"""Bits: in the prompt; banned, or not among the allowed; would end the output."""
COUNT_SHIFT = 3
ONE = 1 << COUNT_SHIFT
"""Once in the output; the bits from here on count it."""


def words(
    vocab: int,
    prompt: npt.NDArray[np.int64],
    output: npt.NDArray[np.int64],
    *,
    allowed: npt.NDArray[np.int64],
    banned: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """[vocab]. All are token ids; no `allowed` allow all."""
    found = (np.bincount(output, minlength=vocab) << COUNT_SHIFT).astype(np.int32)
    found[prompt] |= PROMPT
    if len(allowed):
        refused = np.full(vocab, NEVER, np.int32)
        refused[allowed] = 0
        found |= refused
    found[banned] |= NEVER
    found[ends] |= ENDS
    return found


def adjust(
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    slots: torch.Tensor,
    penalties: torch.Tensor,
    short: torch.Tensor,
) -> torch.Tensor:
    """Rows [R] int64 of logits [N, vocab] fp32, adjusted -> [R, vocab].

    words [S, vocab] int32, of which row r has `slots[r]`, int64; penalties [R, 3] fp32: repetition, presence, frequency, as
    SamplingParams has them; short [R] bool: an output that may not end yet.
    """
    own, word = logits.index_select(0, rows), words.index_select(0, slots)
    repetition, presence, frequency = penalties[:, :, None].unbind(1)
    times = word >> COUNT_SHIFT
    penalised = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where((times > 0) | ((word & PROMPT) > 0), penalised, own)
    own = torch.where(times > 0, own - (presence + frequency * times), own)
    never = ((word & NEVER) > 0) | (((word & ENDS) > 0) & short[:, None])
    return own.masked_fill_(never, float("-inf"))
