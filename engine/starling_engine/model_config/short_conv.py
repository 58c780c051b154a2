"""Gated short convolutions (LFM2, arXiv 2511.23404) as a config describes them: sizes, and names of tensors."""

from dataclasses import dataclass

from starling_engine.model_config.fields import Fields

MAX_KERNEL, MAX_CHANNELS = 256, 1 << 20
"""More than any model has; a config with more is damaged."""


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """Sizes of the layers whose mixer is a gated short convolution.

    channels  as many as a hidden state has elements
    kernel    tokens that a channel sees, the current one included
    bias      of the convolution, and of the matrices before it and behind it
    """

    channels: int
    kernel: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ShortConvNames:
    """Names of a gated short convolution's modules in a checkpoint; see `TensorNames`.

    `fused_in` may hold the three parts of the first matrix one behind the other: the gate of the convolution's input, that of its
    output, and the input itself.
    """

    in_gate: str = "conv.in_gate"
    out_gate: str = "conv.out_gate"
    x: str = "conv.x_proj"
    fused_in: str = "conv.in_proj"
    conv: str = "conv.conv"
    out: str = "conv.out_proj"


def no_short_conv(_config: Fields) -> ShortConvConfig | None:
    """Returns None, for a family without such layers."""
    return None


def read_short_conv(config: Fields) -> ShortConvConfig:
    """Reads the sizes. Raises ModelError naming the bad field."""
    return ShortConvConfig(
        channels=config.integer("hidden_size", high=MAX_CHANNELS),
        kernel=config.integer("conv_L_cache", 3, low=2, high=MAX_KERNEL),
        bias=config.boolean("conv_bias", False),
    )
