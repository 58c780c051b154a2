"""Drafts by prompt lookup where the tokens lie on a device, in torch: what `kernels/ngram_drafts.py` is held to."""

import torch

from starling_engine.step import OWN


def ngram_drafts(
    ids: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    *,
    shortest: int,
    longest: int,
    most: int,
) -> None:
    """Replaces the drafts among a step's ids [T + 1] int64 that are OWN, where the row's sequence ends as it did before.

    They become what followed the latest of the longest places, at least `shortest` tokens long, of which `longest` are compared. A
    row has at most `most` of them, behind its other tokens. Without a place they stay OWN.

    query_start [R + 1] int32, slots [R] int64, starts [R] int64 (see `StepPlan.starts`). By slot: lengths [slots] int64, of
    sequences that are FOLLOWED, and tokens [slots, width] int32. Takes some R * width * 20 bytes.
    """
    first, behind = query_start[:-1, None].long(), query_start[1:, None].long()
    back = torch.arange(most, device=ids.device)
    at = behind - 1 - back
    is_own = (at > first) & (ids[at.clamp(min=0)] == OWN)
    count = is_own.sum(1, keepdim=True)
    begin = torch.where(starts < 0, lengths.index_select(0, slots) - 1, starts)[:, None]
    length = torch.where(count > 0, begin + behind - first - count, 0)
    text = tokens.index_select(0, slots)
    place = torch.arange(text.shape[1], device=ids.device)
    alike, matched = place < length, torch.zeros_like(text)
    for n in range(longest):
        last = text.gather(1, (length - 1 - n).clamp(min=0))
        alike = alike & (place > n) & (text.roll(n + 1, 1) == last)
        matched += alike
    matched = torch.where(matched >= shortest, matched, 0)
    best = (matched * len(place) + place).argmax(1, keepdim=True)
    following = best + (count - 1 - back).clamp(min=0) % (length - best).clamp(min=1)
    found = torch.where(matched.gather(1, best) > 0, text.gather(1, following).long(), OWN)
    spare = len(ids) - 1
    ids.scatter_(0, torch.where(is_own, at, spare).flatten(), found.flatten())
