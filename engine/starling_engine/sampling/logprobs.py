"""Log probabilities as callers see them: of the model's own logits, before penalties and temperature."""

import torch

from starling_engine.step import LogprobRow


def logprob_rows(logits: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> list[LogprobRow]:
    """For each row of logits [R, vocab] fp32 the chosen token [R] int64 first, then the `counts[r]` likeliest."""
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > of_chosen).sum(dim=1) + 1
    # One copy of each tensor to the host, however many rows there are.
    given = zip(chosen.tolist(), of_chosen[:, 0].tolist(), ranks.tolist(), _likeliest(logprobs, counts), strict=True)
    return [LogprobRow([token, *ids], [value, *values], rank) for token, value, rank, (ids, values) in given]


def _likeliest(logprobs: torch.Tensor, counts: list[int]) -> list[tuple[list[int], list[float]]]:
    """For each row the `counts[r]` likeliest tokens and their log probabilities, in falling order."""
    top = torch.topk(logprobs, max(counts), dim=-1)
    return [
        (ids[:count], values[:count]) for ids, values, count in zip(top.indices.tolist(), top.values.tolist(), counts, strict=True)
    ]
