"""Changes to logits before sampling: bias, allowed and banned tokens, minimum length, penalties.

Each works on one row in place. Requests without adjustments cost nothing. A device adjusts many rows by `kernels.token_words`.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.kernels.token_words import words
from starling_engine.params import SamplingParams

NEVER = float("-inf")


class Adjuster:
    """Adjusts the logits of one request. Token lists become tensors once, when the request enters its slot."""

    def __init__(self, params: SamplingParams, num_prompt: int, eos_token_ids: tuple[int, ...]) -> None:
        stops = (*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids))
        self._params = params
        self._num_prompt = num_prompt
        self._biased = _ids(params.logit_bias or ())
        self._bias = torch.tensor(list((params.logit_bias or {}).values()), dtype=torch.float32)
        self._allowed = _ids(params.allowed_token_ids or ())
        self._banned = _ids(params.banned_token_ids or ())
        self._stops = _ids(stops)

    def adjust(self, row: torch.Tensor, tokens: npt.NDArray[np.int32]) -> None:
        """Changes one row of logits [vocab], fp32, on any device. `tokens` are the prompt and the output so far."""
        self._penalise(row, tokens)
        if len(self._biased):
            row[self._biased] += self._bias.to(row.device)
        if len(self._allowed):
            kept = row[self._allowed]
            row.fill_(NEVER)
            row[self._allowed] = kept
        row[self._banned] = NEVER
        if len(tokens) - self._num_prompt < self._params.min_tokens:
            row[self._stops] = NEVER

    def _penalise(self, row: torch.Tensor, tokens: npt.NDArray[np.int32]) -> None:
        """Repetition divides positive and multiplies negative logits of all seen tokens. The other penalties count the output."""
        params = self._params
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(tokens)).long().to(row.device)
            logits = row[seen]
            row[seen] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = np.unique(tokens[self._num_prompt :], return_counts=True)
            penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(row.dtype)
            row[torch.from_numpy(ids).long()] -= penalty.to(row.device)

    # ---- for a device, which adjusts by tables of its own ----

    def words(self, vocab: int, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        """Returns the `kernels.token_words`. `tokens` as for `adjust`."""
        known, start = np.array(tokens), self._num_prompt
        allowed, banned, stops = self._allowed.numpy(), self._banned.numpy(), self._stops.numpy()
        return words(vocab, known[:start], known[start:], allowed=allowed, banned=banned, stops=stops)

    @property
    def bias(self) -> Mapping[int, float]:
        return self._params.logit_bias or {}

    @property
    def settings(self) -> tuple[float, float, float, int]:
        """The penalties for repetition, presence and frequency, and the first position of a token that may end the output."""
        params = self._params
        ends_from = self._num_prompt + params.min_tokens
        return params.repetition_penalty, params.presence_penalty, params.frequency_penalty, ends_from


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


def _ids(tokens: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)
