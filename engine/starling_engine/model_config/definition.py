"""The definition of an architecture: a small file of each family fills in a `ModelDefinition`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig, no_experts
from starling_engine.model_config.rope import DEFAULT_THETA

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The small differences between decoders; see `ModelConfig`."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_draft_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the modules in a checkpoint, to which ".weight" or ".bias" is added.

    Expert n is `experts`.n, its gate, up and down are `expert_projections`; `router_bias` is a tensor's whole name. Names that
    begin with `fused` are those of transformers, which may hold all experts in one tensor.

    `ignored` are endings of tensors that are not loaded: older checkpoints saved computed buffers.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "mlp.shared_experts"
    fused_router: str = "mlp.gate"
    fused_experts: str = "mlp.experts"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


def full_attention(_config: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the windows of a family without a sliding window."""
    return (0,) * num_layers


def no_latents(_config: Fields, _num_heads: int) -> MlaShape | None:
    """Returns None, for a family that caches keys and values."""
    return None


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """One architecture. `head_dim`, `rope_theta` and `rms_eps` are defaults for configs without them.

    Without any head_dim it is hidden size / heads.
    """

    architecture: str
    traits: Callable[[Fields], Traits]
    windows: Callable[[Fields, int], tuple[int, ...]] = full_attention
    mla: Callable[[Fields, int], MlaShape | None] = no_latents
    moe: Callable[[Fields, int], MoeConfig | None] = no_experts
    head_dim: int | None = None
    rope_theta: float = DEFAULT_THETA
    rms_eps: float = 1e-6
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
