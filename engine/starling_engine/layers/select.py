"""Chooses how each matrix is stored and multiplied."""

import logging

import torch

from starling_engine.layers.dense import DenseLinear
from starling_engine.layers.linear import LinearMethod, LinearShape, MethodSelector

logger = logging.getLogger("starling.layers")


def select_linear_method(dtype: torch.dtype, device: torch.device) -> MethodSelector:
    """The selector for a model of `dtype` on `device`; logs what it takes and why, once."""
    logger.info("linear layers: dense (%s on %s)", dtype, device)

    def select(_shape: LinearShape) -> LinearMethod:
        return DenseLinear()

    return select
