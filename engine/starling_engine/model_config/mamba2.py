"""Mamba-2 (arXiv 2405.21060) as a config describes it: sizes, names of tensors, and which layers have it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields, is_number
from starling_engine.model_config.gated_delta import MAX_CHANNELS, MAX_HEADS, MAX_KERNEL
from starling_engine.model_config.layer import Mixer

GatedNorm = Literal["gate first", "gate last", "none"]
MAMBA_MIXERS: Mapping[str, Mixer] = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
}
"""Mixers by their names in `layer_types`: those of the authors, and those of transformers 5."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Sizes of the layers whose mixer is Mamba-2.

    groups        of B and C, which stand for keys and queries; each serves as many consecutive heads as any other
    state_size    elements of B, and of C
    kernel        tokens that the short convolution sees, the current one included
    conv_bias     of the convolution
    in_bias, out_bias   of the matrices before and behind it
    dt_limits     the step size of a token is within them
    norm          of each group's outputs; the gate multiplies them before it, or behind it
    in_scale, out_scale   multiply the input, and the output
    part_scales   multiply the parts of the first matrix's product: gates, inputs, B, C and step sizes
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    norm: GatedNorm = "gate first"
    norm_eps: float = 1e-6
    in_scale: float = 1.0
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_scale: float = 1.0

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Elements of all groups of B; C has as many."""
        return self.groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the short convolution: inputs, B, C."""
        return self.width + 2 * self.group_width


@dataclass(frozen=True, kw_only=True)
class Mamba2Names:
    """Names of a Mamba-2 mixer's modules in a checkpoint; see `TensorNames`. Those of vectors are a tensor's whole name.

    `inputs` holds gates, inputs, B, C and step sizes one behind the other.
    """

    inputs: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    a_log: str = "mamba.A_log"
    skip: str = "mamba.D"
    dt_bias: str = "mamba.dt_bias"
    norm: str = "mamba.norm"
    out: str = "mamba.out_proj"


MIXER = Mamba2Names(
    inputs="mixer.in_proj",
    conv="mixer.conv1d",
    a_log="mixer.A_log",
    skip="mixer.D",
    dt_bias="mixer.dt_bias",
    norm="mixer.norm",
    out="mixer.out_proj",
)
"""The names where a layer's one part is its `mixer`."""


def no_mamba2(_config: Fields) -> Mamba2Config | None:
    """Returns None, for a family without such layers."""
    return None


def read_mamba2(config: Fields, width: int | None = None) -> Mamba2Config:
    """Reads the sizes. `width` is that of all heads; default: `mamba_expand` times the hidden size.

    Raises ModelError naming the bad field, or sizes that do not fit together.
    """
    heads = config.integer("mamba_n_heads", 128, high=MAX_HEADS)
    if width is None:
        width = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    if width % heads or width > MAX_CHANNELS:
        raise config.error("mamba_n_heads", f"must divide {width}, the width of all heads, which is at most {MAX_CHANNELS}")
    written = config.get("mamba_d_head")
    head_dim = width // heads if written in (None, "auto") else config.integer("mamba_d_head")
    if head_dim * heads != width:
        raise config.error("mamba_d_head", f"must be {width // heads}: {heads} heads have {width} elements together")
    mamba = Mamba2Config(
        heads=heads,
        head_dim=head_dim,
        groups=config.integer("mamba_n_groups", 1, high=MAX_HEADS),
        state_size=config.integer("mamba_d_state", 256, high=MAX_CHANNELS),
        kernel=config.integer("mamba_d_conv", 4, low=2, high=MAX_KERNEL),
        conv_bias=config.boolean("mamba_conv_bias", True),
        in_bias=config.boolean("mamba_proj_bias", False),
        out_bias=config.boolean("mamba_proj_bias", False),
        dt_limits=_read_limits(config),
        norm_eps=config.number("rms_norm_eps", 1e-6),
    )
    if heads % mamba.groups:
        raise config.error("mamba_n_groups", f"must divide {config.written('mamba_n_heads')} ({heads})")
    if mamba.group_width > MAX_CHANNELS:
        raise config.error("mamba_d_state", f"must leave all groups at most {MAX_CHANNELS} elements together")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{config.source}: hidden_act {activation!r} is not supported for Mamba-2; supported: silu")
    return mamba


def _read_limits(config: Fields) -> tuple[float, float]:
    """Reads `time_step_limit`, whose second number may be infinite."""
    written = config.get("time_step_limit")
    if written is None:
        return 0.0, math.inf
    limits = [_number(each) for each in written] if isinstance(written, list) else []
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise config.error("time_step_limit", "must be two numbers of at least 0, the lower one first")
    return limits[0], limits[1]


def _number(value: object) -> float:
    """Returns a number, NaN for what is none. transformers 5 writes what JSON has no number for as an object."""
    if value == math.inf or (isinstance(value, dict) and value.get("__float__") == "Infinity"):
        return math.inf
    return float(value) if is_number(value) else math.nan
