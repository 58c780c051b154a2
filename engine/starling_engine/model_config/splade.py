"""Sparse vectors of a masked language model's logits (SPLADE, arXiv 2109.10086), as sentence-transformers describes them."""

from dataclasses import dataclass
from typing import Literal

from starling_engine.model_config.fields import Fields


@dataclass(frozen=True, kw_only=True)
class SpladeConfig:
    """A token's weight in a text is the greatest one that a token of the text gives it, or their sum.

    `twice`: log(1 + x) of the positive logits is taken twice (arXiv 2504.14839).
    """

    pooling: Literal["max", "sum"] = "max"
    twice: bool = False


def read_splade(config: Fields) -> SpladeConfig:
    """Reads the config of the module SpladePooling. Raises UnsupportedModel naming a field."""
    pooling = config.one_of("pooling_strategy", "max", "sum")
    return SpladeConfig(
        pooling="max" if pooling == "max" else "sum",
        twice=config.one_of("activation_function", "relu", "log1p_relu") == "log1p_relu",
    )
