"""Chooses the ops that sample, and that adjust and mask logits."""

import logging
from typing import Protocol

import torch

from starling_engine.kernels import token_words as words
from starling_engine.native import load, ops, reference
from starling_engine.native.sampling_metadata import SamplingMetadata
from starling_engine.platforms.triton_support import why_not_triton

logger = logging.getLogger("starling.sampling")


class SampleOp(Protocol):
    """Samples one token for each row; `native.reference.sample` defines the result."""

    def __call__(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata[torch.Tensor],
        seed: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor: ...


class AdjustOp(Protocol):
    """Adjusts rows of logits; `kernels.token_words.adjust` defines the result."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        words: torch.Tensor,
        slots: torch.Tensor,
        penalties: torch.Tensor,
        below_min_tokens: torch.Tensor,
    ) -> torch.Tensor: ...


class MaskOp(Protocol):
    """Masks rows of logits in place; `native.reference.apply_token_bitmask` defines the result."""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None: ...


def select_adjust_op(device: torch.device) -> AdjustOp:
    """Returns Triton's op where its kernels run, else torch's. A host adjusts row by row, without an op."""
    if why_not_triton(device) is not None:
        return words.adjust
    from starling_engine.kernels import adjust

    return adjust.adjust


def select_mask_op(device: torch.device) -> MaskOp:
    """Returns Triton's op where its kernels run, else the native one where that runs, else torch's."""
    if why_not_triton(device) is None:
        from starling_engine.kernels import token_bitmask

        return token_bitmask.apply_token_bitmask
    native = device.type == "cpu" and load() is not None
    return ops.apply_token_bitmask if native else reference.apply_token_bitmask


def select_sample_op(device: torch.device) -> SampleOp:
    """Returns Triton's op where its kernels run, else the native one where that runs, else torch's."""
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
