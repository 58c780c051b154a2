"""Log probabilities of the model's own logits, before penalties and temperature."""

import torch

from starling_engine.step import LogprobRow


def logprob_rows(logits: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> list[LogprobRow]:
    """Returns for each row of logits [R, vocab] fp32 the `chosen` token [R] int64 first, then the `counts[r]` likeliest."""
    return read_scores(scores(logits, chosen, max(counts)), counts)


def scores(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> torch.Tensor:
    """Returns the input of `read_scores`, one tensor on the logits' device: [R, 3 + 2 * most] int32.

    A row has the rank of the chosen token, that token, and the `most` likeliest. Their log probabilities follow in the same order,
    as the bits of fp32.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = logprobs.gather(1, chosen[:, None])
    rank = (logprobs > of_chosen).sum(dim=1, keepdim=True) + 1
    top = torch.topk(logprobs, most, dim=-1)
    values = torch.cat((of_chosen, top.values), 1).view(torch.int32)
    return torch.cat((rank.int(), chosen[:, None].int(), top.indices.int(), values), 1)


def read_scores(scores: torch.Tensor, counts: list[int]) -> list[LogprobRow]:
    """Reads `scores` that are on the host, with the `counts[r]` likeliest tokens of row r."""
    width = (scores.shape[1] - 1) // 2
    ids, values = scores[:, 1 : 1 + width].tolist(), scores[:, 1 + width :].view(torch.float32).tolist()
    rows = zip(scores[:, 0].tolist(), ids, values, counts, strict=True)
    return [LogprobRow(tokens[: count + 1], logprobs[: count + 1], rank) for rank, tokens, logprobs, count in rows]
