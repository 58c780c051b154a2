"""Chooses the op that samples."""

from typing import Protocol

import torch

from starling_engine.native import load, ops, reference


class SampleOp(Protocol):
    """See `native.reference.sample`, which defines what every one of them computes."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor: ...


def select_sample_op(device: torch.device) -> SampleOp:
    """The native one where it runs, else torch's."""
    return ops.sample if device.type == "cpu" and load() is not None else reference.sample
