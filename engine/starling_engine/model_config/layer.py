"""The description of one decoder layer, in what the layers of a model may differ."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FeedForward = Literal["mlp", "experts"]
Norms = Literal["before", "after", "both", "parallel"]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: attention, then a feed-forward part, both added to one residual stream.

    window        tokens that a query sees, itself included; 0 means all
    rope          index of the rotary embedding in `ModelConfig.ropes`; None: queries and keys are not rotated (NoPE)
    norms         what both parts have: a norm of their input, one of their output before it is added, or both of them;
                  "parallel": one norm, whose output attention and feed-forward take, and add to the stream together
    feed_forward  a plain MLP, or `ModelConfig.moe`
    """

    window: int = 0
    rope: int | None = 0
    norms: Norms = "before"
    feed_forward: FeedForward = "mlp"


def with_windows(windows: Iterable[int], norms: Norms = "before") -> tuple[LayerConfig, ...]:
    """Returns layers that differ in their windows alone."""
    return tuple(LayerConfig(window=window, norms=norms) for window in windows)
