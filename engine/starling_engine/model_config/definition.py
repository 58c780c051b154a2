"""The definition of an architecture: a small file of each family fills in a `ModelDefinition`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, Norms, with_windows
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig, no_experts
from starling_engine.model_config.rope import DEFAULT_THETA, RopeConfig, read_rope
from starling_engine.model_config.traits import Traits

LENGTH_FIELD = "max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the modules in a checkpoint, to which ".weight" or ".bias" is added.

    Expert n is `experts`.n, its gate, up and down are `expert_projections`; `router_bias`,
    `fused_router_bias` and `sinks` are a tensor's whole name.
    Names that begin with `fused` are of tensors that may hold several modules: queries, keys and values; gate and up; all experts,
    whose two tensors are `fused_projections` of `fused_experts`. `alternating_experts` is as `ExpertNames.alternating`.

    Norms of a part's input end with `_norm`, those of its output with `_out_norm`.

    `ignored` are endings of tensors that are not loaded: older checkpoints saved computed buffers. `drafts` are beginnings of other
    such, parts for drafts outside of the layers. `router_bias_is_row` says that the bias is a matrix of one row.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    fused_qkv: str = "self_attn.qkv_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    fused_gate_up: str = "mlp.gate_up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    router_bias_is_row: bool = False
    experts: str = "mlp.experts"
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "mlp.shared_experts"
    shared_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused_shared: str = "mlp.shared_experts.gate_up_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    fused_router: str = "mlp.gate"
    fused_router_bias: str = "mlp.gate.e_score_correction_bias"
    fused_experts: str = "mlp.experts"
    fused_projections: tuple[str, str] = ("gate_up_proj", "down_proj")
    alternating_experts: bool = False
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
    drafts: tuple[str, ...] = ()


def same_layers(norms: Norms = "before") -> Callable[[Fields, int], tuple[LayerConfig, ...]]:
    """Returns the layers of a family in which all are the same, without a sliding window."""
    return lambda _config, num_layers: (LayerConfig(norms=norms),) * num_layers


full_attention = same_layers()


def written_window(config: Fields) -> int:
    """Returns `sliding_window`, for a family whose layers have none where the config has none."""
    return config.integer("sliding_window") if config.has("sliding_window") else 0


def one_window(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns the layers of a family in which all have that window."""
    return with_windows((written_window(config),) * num_layers)


def one_rope(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    """Returns the rotary embedding of a family in which all layers have the same."""
    return (read_rope(config, theta),)


def partial_rope(default: float) -> Callable[[Fields, float], tuple[RopeConfig, ...]]:
    """Returns the same for a family that rotates a part of each head: by default that share of its elements."""
    return lambda config, theta: (read_rope(config, theta, default),)


def fixed_traits(traits: Traits) -> Callable[[Fields], Traits]:
    """Returns these traits whatever the config says, for a family whose traits no field changes."""
    return lambda _config: traits


plain_traits = fixed_traits(Traits())


def no_latents(_config: Fields, _num_heads: int) -> MlaShape | None:
    """Returns None, for a family that caches keys and values."""
    return None


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """One architecture.

    traits        what all layers have in common
    layers        the layers, for so many; experts are added by `moe`
    ropes         the rotary embeddings that the layers name, where `rope_theta` is the default
    mla, moe      latents and experts, of a family that has them

    Others are defaults for configs without the field. Without any head_dim it is hidden size / heads. `eps_field` is the field's
    name, and `length_field` that of the longest sequence, if it is there, in place of max_position_embeddings. `activation_names`
    are those that the family gives to activations of other names.
    """

    architecture: str
    traits: Callable[[Fields], Traits] = plain_traits
    layers: Callable[[Fields, int], tuple[LayerConfig, ...]] = full_attention
    ropes: Callable[[Fields, float], tuple[RopeConfig, ...]] = one_rope
    mla: Callable[[Fields, int], MlaShape | None] = no_latents
    moe: Callable[[Fields, int], MoeConfig | None] = no_experts
    head_dim: int | None = None
    rope_theta: float = DEFAULT_THETA
    rms_eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    length_field: str = LENGTH_FIELD
    activation: str = "silu"
    activation_names: Mapping[str, str] = field(default_factory=dict)
    tie_word_embeddings: bool = False
    names: TensorNames = field(default_factory=TensorNames)


def listed_windows(config: Fields, num_layers: int, window: int) -> tuple[int, ...] | None:
    """Returns the windows by the config's `layer_types`; None when it has no such list.

    Raises ModelError for a list of the wrong length, UnsupportedModel for a type that is not attention.
    """
    types = config.texts("layer_types")
    if not types:
        return None
    if len(types) != num_layers:
        raise config.error("layer_types", f"must have num_hidden_layers ({num_layers}) entries")
    for name in types:
        if name not in LAYER_TYPES:
            raise UnsupportedModel(f"{config.source}: layer_types: {name!r} is not supported; supported: {', '.join(LAYER_TYPES)}")
    if "sliding_attention" in types and not window:
        raise config.error("sliding_window", "must be set, for layer_types names sliding_attention")
    return tuple(window if name == "sliding_attention" else 0 for name in types)


def patterned_windows(config: Fields, num_layers: int, window: int, pattern: int) -> tuple[int, ...]:
    """Returns the windows by the config's `layer_types`; else every `pattern`-th layer sees all tokens. With 0 all layers do."""
    listed = listed_windows(config, num_layers, window)
    return listed or tuple(window if pattern and (layer + 1) % pattern else 0 for layer in range(num_layers))
