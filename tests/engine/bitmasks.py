"""Masks of tokens as kernels get them, and what has to become of the logits that they are applied to."""

import torch
from starling_engine.sampling.select import MaskOp
from torch import Tensor
from torch.nn import functional as F

VOCABS = (1, 31, 32, 33, 96, 2048, 2049, 4100)


def words_of(allowed: Tensor, beyond: bool = False) -> Tensor:
    """The words [M, ceil(vocab / 32)] of masks [M, vocab] bool; `beyond` is the bit of tokens past the vocabulary."""
    bits = F.pad(allowed, (0, -allowed.shape[1] % 32), value=beyond).view(len(allowed), -1, 32).long()
    numbers = (bits << torch.arange(32)).sum(-1)
    return torch.where(numbers < 2**31, numbers, numbers - 2**32).int()


def some_masks(vocab: int) -> Tensor:
    """Bool [M, vocab]: none and all, one token and all but one, whole words, and half of all."""
    token = torch.arange(vocab)
    single = [token == at for at in (0, vocab // 2, vocab - 1)]
    whole = token // 32 % 3 == 0
    return torch.stack([token < 0, token >= 0, *single, *(~one for one in single), whole, ~whole, torch.rand(vocab) < 0.5])


def check_masks(apply: MaskOp, vocab: int, device: torch.device) -> None:
    """Applies masks to some rows of a part of a larger matrix. All that is not forbidden stays, to the bit."""
    torch.manual_seed(vocab)
    allowed = some_masks(vocab)
    wide = torch.randn(2 * len(allowed), vocab + 41)
    for special in (torch.nan, torch.inf, -torch.inf):
        wide[torch.rand_like(wide) < 0.1] = special
    for columns, beyond in ((slice(5, 5 + vocab), False), (slice(vocab), True)):
        rows = torch.randperm(len(wide))[: len(allowed)]
        found, expected = wide.clone(), wide.clone()
        expected[rows, columns] = torch.where(allowed, wide[rows, columns], -torch.inf)
        found = found.to(device)
        apply(found[:, columns], rows.to(device), words_of(allowed, beyond).to(device))
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
