"""Mamba (arXiv 2312.00752) as a config describes it: sizes, and names of tensors."""

from dataclasses import dataclass
from typing import Literal

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import MAX_CHANNELS, MAX_KERNEL

MAX_ELEMENTS = 1 << 26
"""More than any layer's state has; rates of as many channels are made before a checkpoint's tensors are compared."""

InnerNorms = Literal["none", "without weights", "weights"]


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes of the layers whose mixer is Mamba.

    state_size  elements of B, and of C, and so of each channel's state
    kernel      tokens that the short convolution sees, the current one included
    rank        of the matrix that makes the channels' step sizes
    conv_bias   of the convolution; `bias`: of the matrices before and behind all
    norms       of what step sizes are made of, of B and of C: RMSNorm, by weights or without
    """

    channels: int
    state_size: int
    kernel: int
    rank: int
    conv_bias: bool = True
    bias: bool = False
    norms: InnerNorms = "none"
    norm_eps: float = 1e-6

    @property
    def made(self) -> tuple[int, int, int]:
        """Elements that a token's inputs are made into: for step sizes, B, and C."""
        return self.rank, self.state_size, self.state_size


@dataclass(frozen=True, kw_only=True)
class MambaNames:
    """Names of a Mamba mixer's modules in a checkpoint; see `TensorNames`. `a_log` and `skip` are a tensor's whole name.

    `inputs` holds inputs and gates one behind the other, `made` what step sizes are made of, B and C.
    """

    inputs: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    made: str = "mamba.x_proj"
    steps: str = "mamba.dt_proj"
    norms: tuple[str, str, str] = ("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")
    a_log: str = "mamba.A_log"
    skip: str = "mamba.D"
    out: str = "mamba.out_proj"


def no_mamba(_config: Fields) -> MambaConfig | None:
    """Returns None, for a family without such layers."""
    return None


def read_mamba(config: Fields, norms: InnerNorms = "none", eps_field: str = "rms_norm_eps") -> MambaConfig:
    """Reads the sizes. Raises ModelError naming the bad field, or sizes that do not fit together.

    Channels are as many as `mamba_channels` says, or `mamba_expand` times the hidden size.
    """
    hidden_size = config.integer("hidden_size", high=MAX_CHANNELS)
    if config.has("mamba_channels"):
        channels = config.integer("mamba_channels", high=MAX_CHANNELS)
    else:
        channels = config.integer("mamba_expand", 2) * hidden_size
    if channels > MAX_CHANNELS:
        raise config.error("mamba_expand", f"must leave at most {MAX_CHANNELS} channels, {hidden_size} elements expanded")
    is_written = config.get("mamba_dt_rank") not in (None, "auto")
    mamba = MambaConfig(
        channels=channels,
        state_size=config.integer("mamba_d_state", 16, high=MAX_ELEMENTS // channels),
        kernel=config.integer("mamba_d_conv", 4, low=2, high=MAX_KERNEL),
        rank=config.integer("mamba_dt_rank", high=MAX_CHANNELS) if is_written else -(-hidden_size // 16),
        conv_bias=config.boolean("mamba_conv_bias", True),
        bias=config.boolean("mamba_proj_bias", False),
        norms=norms,
        norm_eps=config.number(eps_field, 1e-6),
    )
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{config.source}: hidden_act {activation!r} is not supported for Mamba; supported: silu")
    return mamba
