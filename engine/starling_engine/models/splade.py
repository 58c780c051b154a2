"""A weight for each token of the vocabulary, of the logits of a text's tokens (SPLADE, arXiv 2109.10086)."""

import torch

from starling_engine.model_config.splade import SpladeConfig


def add_tokens(config: SpladeConfig, logits: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """logits [N, vocab_size] fp32, which are overwritten -> the weights [vocab_size] of these tokens and those `before`."""
    weights = logits.relu_().log1p_()
    if config.twice:
        weights.log1p_()
    if config.pooling == "sum":
        found = weights.sum(dim=0)
        return found if before is None else before + found
    found = weights.amax(dim=0)
    return found if before is None else torch.maximum(before, found)
