"""Gated DeltaNet (arXiv 2412.06464) as a config describes it: sizes, names of tensors, and which layers have it."""

from collections.abc import Mapping
from dataclasses import dataclass

from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, Mixer, Norms

MAX_KERNEL, MAX_HEADS, MAX_CHANNELS = 256, 1 << 14, 1 << 20
"""More than any model has; a config with more is damaged."""
MIXERS: Mapping[str, Mixer] = {"linear_attention": "gated delta net", "full_attention": "attention"}
"""Mixers by their names in `layer_types`."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Sizes of the layers whose mixer is Gated DeltaNet.

    key_heads    of queries and of keys; each serves as many consecutive value heads as any other
    kernel       tokens that the short convolution sees, the current one included
    rate_scale   multiplies a token's rate of learning, which is within 0 and 1; with 2, what was learnt may change its sign
    norm_eps     of the norm of each value head's output
    gate_rank    of the matrices that make decays and gates of the output, where each channel of a key has a decay (Kimi Delta
                 Attention); 0: a head has one
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    rate_scale: float = 1.0
    norm_eps: float = 1e-6
    gate_rank: int = 0

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token; queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True)
class DeltaNames:
    """Names of a Gated DeltaNet's modules in a checkpoint; see `TensorNames`. `a_log` and `dt_bias` are a tensor's whole name.

    z is the gate of the output, b and a are what the new value's weight and the decay are made of. `fused_qkv` may hold queries,
    keys and values one behind the other, `fused_conv` their convolutions.

    Decays and gates of Kimi Delta Attention are made by a narrow matrix each (`_in`) and a wide one (`_out`).

    Where `qkvz` is a name, that module holds queries, keys, values and gates of each key head in turn, and `ba` the others so.
    """

    qkvz: str = ""
    ba: str = ""
    q: str = "linear_attn.q_proj"
    k: str = "linear_attn.k_proj"
    v: str = "linear_attn.v_proj"
    fused_qkv: str = "linear_attn.in_proj_qkv"
    z: str = "linear_attn.in_proj_z"
    b: str = "linear_attn.in_proj_b"
    a: str = "linear_attn.in_proj_a"
    decay_in: str = ""
    decay_out: str = ""
    gate_in: str = ""
    gate_out: str = ""
    q_conv: str = "linear_attn.q_conv1d"
    k_conv: str = "linear_attn.k_conv1d"
    v_conv: str = "linear_attn.v_conv1d"
    fused_conv: str = "linear_attn.conv1d"
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


def no_gated_delta(_config: Fields) -> GatedDeltaConfig | None:
    """Returns None, for a family all of whose layers attend."""
    return None


def read_gated_delta(config: Fields) -> GatedDeltaConfig:
    """Reads the sizes. Raises ModelError naming the bad field, or heads that do not fit together."""
    delta = GatedDeltaConfig(
        key_heads=config.integer("linear_num_key_heads", high=MAX_HEADS),
        value_heads=config.integer("linear_num_value_heads", high=MAX_HEADS),
        key_dim=config.integer("linear_key_head_dim", high=MAX_CHANNELS),
        value_dim=config.integer("linear_value_head_dim", high=MAX_CHANNELS),
        kernel=config.integer("linear_conv_kernel_dim", low=2, high=MAX_KERNEL),
        norm_eps=config.number("rms_norm_eps", 1e-6),
    )
    if delta.value_heads % delta.key_heads:
        raise ModelError(
            f"{config.source}: linear_num_value_heads ({delta.value_heads}) must be a multiple of linear_num_key_heads "
            f"({delta.key_heads})"
        )
    for name, width in (("linear_key_head_dim", delta.key_width), ("linear_value_head_dim", delta.value_width)):
        if width > MAX_CHANNELS:
            raise config.error(name, f"must leave all heads at most {MAX_CHANNELS} elements together")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{config.source}: hidden_act {activation!r} is not supported for linear_attention; supported: silu")
    return delta


def hybrid_layers(
    config: Fields,
    num_layers: int,
    written: list[str],
    norms: Norms = "before",
    rope: int | None = 0,
    mixers: Mapping[str, Mixer] = MIXERS,
) -> tuple[LayerConfig, ...]:
    """Returns the layers by `layer_types`, whose names are in `mixers`; by `written` where the config has no such list.

    Raises ModelError for a list of the wrong length, UnsupportedModel for an unknown type.
    """
    types = config.texts("layer_types") or written
    if len(types) != num_layers:
        raise config.error("layer_types", f"must have num_hidden_layers ({num_layers}) entries")
    for name in types:
        if name not in mixers:
            raise UnsupportedModel(f"{config.source}: layer_types: {name!r} is not supported; supported: {', '.join(mixers)}")
    return tuple(LayerConfig(mixer=mixers[name], norms=norms, rope=rope) for name in types)


def every_nth_attends(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns the layers of which, without `layer_types`, every `full_attention_interval`-th attends."""
    interval = config.integer("full_attention_interval", 4)
    return hybrid_layers(
        config,
        num_layers,
        ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)],
    )
