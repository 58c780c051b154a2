"""A token word: an int32 for each token of the vocabulary and each request, with all that the request's adjustments need of it.

Three bits are flags, and the others count the token in the output. The words are on the device. So it adjusts a row by itself, and
counts the tokens that it samples before the host knows them.
"""

import numpy as np
import numpy.typing as npt
import torch

PROMPT, BANNED, STOP = 1, 2, 4
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
    stops: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """Returns the words [vocab]. All arguments are token ids; an empty `allowed` allows all tokens."""
    found = (np.bincount(output, minlength=vocab) << COUNT_SHIFT).astype(np.int32)
    found[prompt] |= PROMPT
    if len(allowed):
        refused = np.full(vocab, BANNED, np.int32)
        refused[allowed] = 0
        found |= refused
    found[banned] |= BANNED
    found[stops] |= STOP
    return found


def adjust(
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    slots: torch.Tensor,
    penalties: torch.Tensor,
    below_min_tokens: torch.Tensor,
) -> torch.Tensor:
    """Adjusts the rows [R] int64 of logits [N, vocab] fp32 -> [R, vocab].

    words [S, vocab] int32; `slots[r]`, int64, is the row of words for row r. penalties [R, 3] fp32: repetition, presence,
    frequency, as in SamplingParams. below_min_tokens [R] bool: outputs that may not end yet.
    """
    own, word = logits.index_select(0, rows), words.index_select(0, slots)
    repetition, presence, frequency = penalties[:, :, None].unbind(1)
    output_count = word >> COUNT_SHIFT
    penalised = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where((output_count > 0) | ((word & PROMPT) > 0), penalised, own)
    own = torch.where(output_count > 0, own - (presence + frequency * output_count), own)
    masked = ((word & BANNED) > 0) | (((word & STOP) > 0) & below_min_tokens[:, None])
    return own.masked_fill_(masked, float("-inf"))
