"""The definition of an architecture: a small file of each family fills in a `ModelDefinition`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.adapters import AdapterConfig, no_adapters
from starling_engine.model_config.classifier import ReadHead, decoder_head, decoder_token_head
from starling_engine.model_config.compressed import CompressedNames, CompressedShape, no_compression
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import DeltaNames, GatedDeltaConfig, no_gated_delta
from starling_engine.model_config.layer import LayerConfig, Norms, with_windows
from starling_engine.model_config.mamba import MambaConfig, MambaNames, no_mamba
from starling_engine.model_config.mamba2 import Mamba2Config, Mamba2Names, no_mamba2
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import ExpertLayout, MoeConfig, no_experts
from starling_engine.model_config.rope import DEFAULT_THETA, RopeConfig, read_rope
from starling_engine.model_config.short_conv import ShortConvConfig, ShortConvNames, no_short_conv
from starling_engine.model_config.traits import Traits

LENGTH_FIELD = "max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the modules in a checkpoint, to which ".weight" or ".bias" is added.

    Expert n is `experts`.n, its gate, up and down are `expert_projections`; `router_bias`,
    `fused_router_bias`, `router_table`, `sinks`, `router_scale`, `expert_scales` and
    `layer_scalar` are a tensor's whole name.
    Names that begin with `fused` are of tensors that may hold several modules: queries, keys and values; gate and up; all experts.
    Those are two tensors, each of which may have several names, and they lie as `expert_layout` says.

    Where q, k and v are one name, that module holds of each key-value head its queries, the key and the value in turn.
    `other_lm_head` is another name of the head. `activation` has the parameters of an MLP's activation. `delta`, `mamba`, `mamba2`
    and `short_conv` have the names of a Gated DeltaNet, a Mamba mixer, one of Mamba-2 and a gated short convolution. `compressed`
    has those of compressed attention. `attention_streams`, `mlp_streams` and `head_streams` begin the names of three tensors each,
    in models with several residual streams.

    Norms of a part's input end with `_norm`, those of its output with `_out_norm`. Of an MLP beside experts that is
    `beside_out_norm`: `mlp_norm` and `mlp_out_norm` are around both.

    `ignored` are endings of tensors that are not loaded: older checkpoints saved computed buffers. `left_out` are beginnings of
    other such: parts for drafts outside of the layers, and heads of other tasks. `router_bias_is_row` says that the bias is a
    matrix of one row. `transposed` says that matrices of attention and MLPs have a column for each output. In `fused_gate_up` the
    gate comes first, unless `fused_up_first` says otherwise. `other_mlp` is another name of the module of a plain MLP.
    `attention_gate` is the module of gates of attention's output, where they do not lie behind each head's query.
    """

    embedding: str = "model.embed_tokens"
    distance_bias: str = "encoder.relative_attention_bias"
    distances: str = "encoder.rel_embeddings"
    distances_norm: str = "encoder.LayerNorm"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    other_lm_head: str = ""
    layer: str = "model.layers.{}"
    attention_gate: str = ""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    fused_qkv: str = "self_attn.qkv_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    delta: DeltaNames = field(default_factory=DeltaNames)
    mamba: MambaNames = field(default_factory=MambaNames)
    mamba2: Mamba2Names = field(default_factory=Mamba2Names)
    short_conv: ShortConvNames = field(default_factory=ShortConvNames)
    compressed: CompressedNames = field(default_factory=CompressedNames)
    attention_streams: str = "hc_attn_"
    mlp_streams: str = "hc_ffn_"
    head_streams: str = "model.hc_head.hc_"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    index_q: str = "self_attn.indexer.wq_b"
    index_k: str = "self_attn.indexer.wk"
    index_k_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    other_mlp: str = ""
    fused_gate_up: str = "mlp.gate_up_proj"
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    router_bias_is_row: bool = False
    router_table: str = "mlp.gate.tid2eid"
    experts: str = "mlp.experts"
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "mlp.shared_experts"
    shared_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused_shared: str = "mlp.shared_experts.gate_up_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    fused_router: str = "mlp.gate"
    fused_router_bias: str = "mlp.gate.e_score_correction_bias"
    fused_up_first: bool = False
    fused_experts: tuple[tuple[str, ...], tuple[str, ...]] = (("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",))
    expert_layout: ExpertLayout = "rows"
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    beside_out_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    layer_table: str = "model.embed_tokens_per_layer"
    layer_projection: str = "model.per_layer_model_projection"
    layer_projection_norm: str = "model.per_layer_projection_norm"
    layer_input_gate: str = "per_layer_input_gate"
    layer_input_projection: str = "per_layer_projection"
    layer_input_norm: str = "post_per_layer_input_norm"
    layer_scalar: str = "layer_scalar"
    transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
    left_out: tuple[str, ...] = ()


MAX_LAYERS = 10_000
"""More than any model has; a config with more is damaged."""


def read_num_layers(config: Fields) -> int:
    """Returns `num_hidden_layers`."""
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


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


def no_ropes(_config: Fields, _theta: float) -> tuple[RopeConfig, ...]:
    """Returns none, for a family that rotates nothing."""
    return ()


def partial_rope(default: float) -> Callable[[Fields, float], tuple[RopeConfig, ...]]:
    """Returns the same for a family that rotates a part of each head: by default that share of its elements."""
    return lambda config, theta: (read_rope(config, theta, default),)


def fixed_traits(traits: Traits) -> Callable[[Fields], Traits]:
    """Returns these traits whatever the config says, for a family whose traits no field changes."""
    return lambda _config: traits


plain_traits = fixed_traits(Traits())


def written_size(_config: Fields, size: int) -> int:
    """Returns the width of a plain MLP that is written, for a family that does not compute it."""
    return size


def written_kv_heads(config: Fields, num_heads: int) -> int:
    """Returns `num_key_value_heads`, which are as many as the others where the config has none."""
    return config.integer("num_key_value_heads", num_heads)


def no_latents(_config: Fields, _num_heads: int) -> MlaShape | None:
    """Returns None, for a family that caches keys and values."""
    return None


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """One architecture.

    traits        what all layers have in common
    num_layers    the number of layers
    layers        the layers, for so many; experts are added by `moe`
    ropes         the rotary embeddings that the layers name, where `rope_theta` is the default
    kv_heads      the number of key-value heads, beside so many of queries
    mla, moe      latents and experts, of a family that has them; so is `compressed` attention with compressed runs of tokens
    gated_delta   Gated DeltaNet, of a family whose layers may have it; read where one has. So are Mamba by `mamba`, Mamba-2 by
                  `mamba2` and gated short convolutions by `short_conv`
    mlp_size      the width of a plain MLP, from what the config's field says
    head          of its checkpoints for classification, or of those that score pairs; None: these are not supported
    token_head    of its checkpoints that label tokens
    masked_head   of its checkpoints for masked tokens, by which vectors are sparse; `out` has the bias; None: none is supported
    adapters      low-rank ones that its checkpoints have, one for each task
    causal        False for an encoder, whose tokens see each other in both directions

    Others are defaults for configs without the field. Without any head_dim it is hidden size / heads. `eps_field` is the field's
    name, `mlp_field` that of a plain MLP's width. `length_field` is that of the longest sequence, if it is there, in place of
    max_position_embeddings. `activation_names` are those that the family gives to activations of other names, `field_names` the
    family's names of the config's fields. `nested` is the field that holds the text model's fields, of a model that has more parts:
    fields of a model without that field are the text model's. `texts` are definitions in place of this one, by the text model's
    `model_type`. `defaults` are values of fields that configs may leave out.
    """

    architecture: str
    traits: Callable[[Fields], Traits] = plain_traits
    num_layers: Callable[[Fields], int] = read_num_layers
    layers: Callable[[Fields, int], tuple[LayerConfig, ...]] = full_attention
    ropes: Callable[[Fields, float], tuple[RopeConfig, ...]] = one_rope
    kv_heads: Callable[[Fields, int], int] = written_kv_heads
    mla: Callable[[Fields, int], MlaShape | None] = no_latents
    compressed: Callable[[Fields, int], CompressedShape | None] = no_compression
    moe: Callable[[Fields, int], MoeConfig | None] = no_experts
    gated_delta: Callable[[Fields], GatedDeltaConfig | None] = no_gated_delta
    mamba: Callable[[Fields], MambaConfig | None] = no_mamba
    mamba2: Callable[[Fields], Mamba2Config | None] = no_mamba2
    short_conv: Callable[[Fields], ShortConvConfig | None] = no_short_conv
    mlp_size: Callable[[Fields, int], int] = written_size
    adapters: Callable[[Fields], AdapterConfig | None] = no_adapters
    causal: bool = True
    head: ReadHead | None = decoder_head
    token_head: ReadHead | None = decoder_token_head
    masked_head: ReadHead | None = None
    head_dim: int | None = None
    rope_theta: float = DEFAULT_THETA
    rms_eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    length_field: str = LENGTH_FIELD
    mlp_field: str = "intermediate_size"
    nested: str = ""
    texts: Mapping[str, "ModelDefinition"] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "silu"
    activation_names: Mapping[str, str] = field(default_factory=dict)
    field_names: Mapping[str, str] = field(default_factory=dict)
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
