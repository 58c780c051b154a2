"""Chooses the op that samples."""

import logging
from typing import Protocol

import torch

from starling_engine.kernels import token_words as words
from starling_engine.native import load, ops, reference
from starling_engine.platforms.triton_support import why_not_triton

logger = logging.getLogger("starling.sampling")


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


class AdjustOp(Protocol):
    """See `kernels.token_words.adjust`, which defines what every one of them computes."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        words: torch.Tensor,
        slots: torch.Tensor,
        penalties: torch.Tensor,
        short: torch.Tensor,
    ) -> torch.Tensor: ...


def select_adjust_op(device: torch.device) -> AdjustOp:
    """Triton's where its kernels run, else torch's: hosts adjust row by row, and need none."""
    if why_not_triton(device) is not None:
        return words.adjust
    from starling_engine.kernels import adjust

    return adjust.adjust


def select_sample_op(device: torch.device) -> SampleOp:
    """Triton's where its kernels run, else the native one where that runs, else torch's."""
    not_triton = why_not_triton(device)
    if not_triton is None:
        from starling_engine.kernels import sample

        logger.info("sampling: triton (the fastest here)")
        return sample.sample
    if device.type == "cpu" and load() is not None:
        logger.info("sampling: native (not triton: %s)", not_triton)
        return ops.sample
    logger.info("sampling: torch (not triton: %s; not native: no kernels for this device or machine)", not_triton)
    return reference.sample
