"""Changes to logits before sampling: bias, allowed and banned tokens, minimum length, penalties.

Each works on one row in place; rows that ask for none of it cost nothing.
"""

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.params import SamplingParams

NEVER = float("-inf")


def needs_adjusting(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.banned_token_ids
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def adjust(
    row: torch.Tensor,
    params: SamplingParams,
    tokens: npt.NDArray[np.int32],
    num_prompt: int,
    stop_ids: frozenset[int],
) -> None:
    """Changes one row of logits [vocab], fp32. `tokens` are the prompt and the output so far; `stop_ids` would end the request."""
    _penalise(row, params, tokens, num_prompt)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, dtype=torch.int64)
        kept = row[allowed]
        row.fill_(NEVER)
        row[allowed] = kept
    if params.banned_token_ids:
        row[torch.tensor(params.banned_token_ids, dtype=torch.int64)] = NEVER
    if len(tokens) - num_prompt < params.min_tokens and stop_ids:
        row[torch.tensor(list(stop_ids), dtype=torch.int64)] = NEVER


def _penalise(
    row: torch.Tensor, params: SamplingParams, tokens: npt.NDArray[np.int32], num_prompt: int
) -> None:
    """Repetition divides positive and multiplies negative logits of all seen tokens; presence and frequency count the output."""
    if params.repetition_penalty != 1.0 and len(tokens):
        seen = torch.from_numpy(np.unique(tokens)).long()
        logits = row[seen]
        row[seen] = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
    if (params.presence_penalty or params.frequency_penalty) and len(tokens) > num_prompt:
        ids, counts = np.unique(tokens[num_prompt:], return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(row.dtype)
        row[torch.from_numpy(ids).long()] -= penalty
