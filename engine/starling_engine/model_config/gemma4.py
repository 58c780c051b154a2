"""Gemma 4 as a text model: heads of two sizes, layers that share keys and values, inputs of each layer, experts.

12B (unified) has neither inputs of layers nor experts.
"""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames, patterned_windows, read_num_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import KVHeads, LayerConfig
from starling_engine.model_config.moe import MoeConfig, Routing, TanhGelu, checked, read_num_experts
from starling_engine.model_config.rope import DEFAULT_THETA, RopeConfig, read_rope_of
from starling_engine.model_config.traits import LayerInputs, Traits

WINDOW, PATTERN = 512, 6
PER_LAYER, PER_LAYER_ROWS = 256, 262_144
HEAD_DIM, FULL_HEAD_DIM = 256, 512
FULL_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
SLIDING_ROPE = {"rope_type": "default", "rope_theta": 1e4}
OTHER_PARTS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
NAMES = TensorNames(
    router="router.proj",
    fused_router="router.proj",
    experts="experts",
    fused_experts=(("experts.gate_up_proj",), ("experts.down_proj",)),
    mlp_norm="pre_feedforward_layernorm",
    left_out=tuple(f"{prefix}{part}." for prefix in ("model.", "") for part in OTHER_PARTS),
)


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        norm="wide weight",
        qk_norm="head",
        value_norm=True,
        layer_inputs=_layer_inputs(config),
        layer_scalar=True,
        attention_scale=1.0,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_cap=config.number("final_logit_softcapping", 0.0),
    )


def _layer_inputs(config: Fields) -> LayerInputs | None:
    size = config.integer("hidden_size_per_layer_input", PER_LAYER, low=0, high=1 << 16)
    rows = config.integer("vocab_size_per_layer_input", PER_LAYER_ROWS)
    if size and rows < config.integer("vocab_size"):
        raise config.error("vocab_size_per_layer_input", "must be at least vocab_size")
    return LayerInputs(size, rows) if size else None


def _windows(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the windows. The last layer sees all tokens, whatever the config says of it."""
    window = config.integer("sliding_window", WINDOW)
    if _sees_both(config):
        window = window // 2 + 2  # half of them on each side, and one more: so transformers has it, unlike Gemma 3's
    return *patterned_windows(config, num_layers, window, PATTERN)[:-1], 0


def _sees_both(config: Fields) -> bool:
    return bool(config.get("use_bidirectional_attention") == "all")


def _own_heads(config: Fields, layer: int, window: int) -> KVHeads | None:
    """Returns the heads of a layer that has others: transformers writes them by layer, Google for all that see all tokens."""
    usual = KVHeads(
        config.integer("num_key_value_heads", config.integer("num_attention_heads")), config.integer("head_dim", HEAD_DIM)
    )
    listed, count, dim = config.child("per_layer_config"), usual.count, usual.dim
    if listed.names():
        own = listed.child(str(layer))
        count, dim = own.integer("num_key_value_heads", count), own.integer("head_dim", dim)
    elif not window:
        dim = config.integer("global_head_dim", FULL_HEAD_DIM)
        count = config.integer("num_global_key_value_heads", count) if config.boolean("attention_k_eq_v", False) else count
    found = KVHeads(count, dim)
    return None if found == usual else found


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which those that slide have the second rotary embedding. The last ones may read the cache of others."""
    same, double = (config.boolean(name, False) for name in ("attention_k_eq_v", "use_double_wide_mlp"))
    windows = _windows(config, num_layers)
    sources = _sources(config, windows)
    size = 2 * config.integer("intermediate_size") if double else None
    return tuple(
        LayerConfig(
            window=window,
            rope=1 if window else 0,
            norms="both",
            kv_heads=_own_heads(config, layer, window),
            keys_are_values=same and not window and source is None,
            cache_of=source,
            mlp_size=None if source is None else size,
        )
        for layer, (window, source) in enumerate(zip(windows, sources, strict=True))
    )


def _sources(config: Fields, windows: tuple[int, ...]) -> list[int | None]:
    """Returns for each layer the one whose cache it reads: the last of its kind that has one; None for those that have."""
    shared = config.integer("num_kv_shared_layers", 0, low=0)
    if shared and _sees_both(config):
        raise UnsupportedModel(f"{config.source}: num_kv_shared_layers of a model that sees both directions is not supported")
    own = len(windows) - shared
    last = {window: layer for layer, window in enumerate(windows[: max(own, 0)])}
    if not {*windows} <= last.keys():
        raise config.error("num_kv_shared_layers", "must leave a layer of each kind with keys and values of its own")
    return [None if layer < own else last[window] for layer, window in enumerate(windows)]


def _ropes(config: Fields, _theta: float) -> tuple[RopeConfig, ...]:
    """Reads the rotary embeddings of layers that see all tokens, and of those that slide, for heads of their size."""
    full, sliding = _head_dims(config)
    nested = config.child("rope_parameters").with_defaults({"full_attention": FULL_ROPE, "sliding_attention": SLIDING_ROPE})
    return _rope(config, nested.child("full_attention"), full), _rope(config, nested.child("sliding_attention"), sliding)


def _rope(config: Fields, fields: Fields, head_dim: int) -> RopeConfig:
    partial = fields.number("partial_rotary_factor", 1.0) if fields.text("rope_type", "default") == "proportional" else 1.0
    if not 0 < partial <= 1:
        raise fields.error("partial_rotary_factor", "must be above 0, and at most 1")
    return replace(read_rope_of(fields, config, DEFAULT_THETA, partial), head_dim=head_dim)


def _head_dims(config: Fields) -> tuple[int, int]:
    """Returns the elements of a head in layers that see all tokens, and in those that slide. One kind has one size."""
    usual = config.integer("head_dim", HEAD_DIM)
    sizes: dict[bool, set[int]] = {False: set(), True: set()}
    for layer, window in enumerate(_windows(config, read_num_layers(config))):
        own = _own_heads(config, layer, window)
        sizes[window > 0].add(usual if own is None else own.dim)
    if any(len(found) > 1 for found in sizes.values()):
        raise UnsupportedModel(f"{config.source}: per_layer_config: heads of several sizes in layers of one kind are not supported")
    full, sliding = (found.pop() if found else usual for found in sizes.values())
    return full, sliding


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    """Reads experts, which all layers have, or none."""
    if not config.boolean("enable_moe_block", False):
        return None
    experts, top_k = read_num_experts(config, "num_experts"), config.integer("top_k_experts")
    routing = Routing(num_experts=experts, top_k=top_k, renormalize=True)
    size = config.integer("moe_intermediate_size")
    return MoeConfig(
        layers=tuple(range(num_layers)),
        intermediate_size=size,
        routing=checked(config, routing),
        gate=TanhGelu(),
        beside_mlp=True,
    )


GEMMA4 = ModelDefinition(
    architecture="Gemma4ForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=_ropes,
    moe=_moe,
    head_dim=HEAD_DIM,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    nested="text_config",
    names=NAMES,
)
GEMMA4_UNIFIED = replace(
    GEMMA4, architecture="Gemma4UnifiedForCausalLM", defaults={"hidden_size_per_layer_input": 0, "sliding_window": 1024}
)
