"""Log probabilities as callers see them: of the model's own logits, before penalties and temperature."""

import torch

from starling_engine.step import LogprobRow


def logprob_rows(logits: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> list[LogprobRow]:
    """For each row of logits [R, vocab] fp32 the chosen token [R] int64 first, then the `counts[r]` likeliest."""
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > of_chosen).sum(dim=1) + 1
    top = torch.topk(logprobs, max(counts), dim=-1) if max(counts) else None
    rows = []
    for r, count in enumerate(counts):
        ids, values = [int(chosen[r])], [float(of_chosen[r])]
        if top is not None:
            ids += top.indices[r, :count].tolist()
            values += top.values[r, :count].tolist()
        rows.append(LogprobRow(ids, values, int(ranks[r])))
    return rows
