"""A word of 4 bytes for each token of the vocabulary, with all that a request's adjustments need to know of the token.

The words are on the device. So it adjusts a row by itself, and counts the tokens that it samples before the host knows them.
"""

import numpy as np
import numpy.typing as npt
import torch

PROMPT, NEVER, ENDS = 1, 2, 4
"""Bits: the token is in the prompt; it is banned, or not allowed; it would end the output."""
COUNT_SHIFT = 3
ONE = 1 << COUNT_SHIFT
"""One occurrence in the output: the bits from COUNT_SHIFT on count them."""


def words(
    vocab: int,
    prompt: npt.NDArray[np.int64],
    output: npt.NDArray[np.int64],
    *,
    allowed: npt.NDArray[np.int64],
    banned: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """Returns the words [vocab]. All arguments are token ids; an empty `allowed` allows all tokens."""
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
    """Adjusts the rows [R] int64 of logits [N, vocab] fp32 -> [R, vocab].

    words [S, vocab] int32; `slots[r]`, int64, is the row of words for row r. penalties [R, 3] fp32: repetition, presence,
    frequency, as in SamplingParams. short [R] bool: outputs that may not end yet.
    """
    own, word = logits.index_select(0, rows), words.index_select(0, slots)
    repetition, presence, frequency = penalties[:, :, None].unbind(1)
    times = word >> COUNT_SHIFT
    penalised = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where((times > 0) | ((word & PROMPT) > 0), penalised, own)
    own = torch.where(times > 0, own - (presence + frequency * times), own)
    never = ((word & NEVER) > 0) | (((word & ENDS) > 0) & short[:, None])
    return own.masked_fill_(never, float("-inf"))
