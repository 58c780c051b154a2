"""DeepSeek-V4: a window of tokens beside compressed runs of earlier ones, several residual streams, experts in every layer.

The first layers choose experts by a table of token ids. Field names are those of `transformers` and of published configs.
"""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.compressed import CompressedShape
from starling_engine.model_config.deepseek import MAX_INDEX_DIM, MAX_INDEX_HEADS, MAX_LATENT, MAX_TOP
from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, Runs
from starling_engine.model_config.mla_shape import IndexShape
from starling_engine.model_config.moe import ClampedSwiglu, MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.rope import RopeConfig, YarnScaling, read_rope_of
from starling_engine.model_config.traits import Streams, Traits

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Kinds of layers by their rate in `compress_ratios`, which published configs have."""
RATES = {SPARSE: 4, HEAVY: 128}
BY_TABLE, BY_SCORE = "hash_moe", "moe"
MAX_RATE, MAX_STREAMS = 1 << 12, 64
"""More than any model has; a config with more is damaged."""
ROTATED = 64 / 512
"""Part of a head that is rotated, where a config does not say."""


def _kinds(config: Fields, num_layers: int) -> list[str]:
    """Returns each layer's kind. Without a list the first two are heavily compressed, and then both kinds take turns."""
    kinds = config.texts("layer_types")
    if not kinds and config.has("compress_ratios"):
        rates = config.integers("compress_ratios")
        if unknown := set(rates) - KINDS.keys():
            raise UnsupportedModel(f"{config.source}: compress_ratios: {min(unknown)} is not supported; supported: 0, 4, 128")
        kinds = [KINDS[rate] for rate in rates]
    if not kinds:
        kinds = [SPARSE if at > 1 and at % 2 else HEAVY for at in range(num_layers)]
    if len(kinds) < num_layers:
        raise config.error("layer_types", f"must have num_hidden_layers ({num_layers}) entries")
    for kind in kinds:
        if kind not in KINDS.values():
            supported = ", ".join(KINDS.values())
            raise UnsupportedModel(f"{config.source}: layer_types: {kind!r} is not supported; supported: {supported}")
    return kinds[:num_layers]


def _rate(config: Fields, kind: str) -> int:
    """Returns the tokens of a run. Older configs have fields of another name."""
    older = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}[kind]
    rates, default = config.child("compress_rates"), config.integer(older, RATES[kind], high=MAX_RATE)
    return rates.integer(kind, default, high=MAX_RATE)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    window = config.integer("sliding_window", 128)
    plain = LayerConfig(window=window, norms="before", rope=0)
    by_kind = {SLIDING: plain}
    for kind in (SPARSE, HEAVY):
        by_kind[kind] = replace(plain, rope=1, runs=Runs(_rate(config, kind), indexed=kind == SPARSE))
    return tuple(by_kind[kind] for kind in _kinds(config, num_layers))


def _shape(config: Fields, num_heads: int) -> CompressedShape:
    if config.integer("num_key_value_heads", 1) != 1:
        raise config.error("num_key_value_heads", "must be 1: one row serves all heads")
    head_dim, groups = config.integer("head_dim", 512, high=MAX_LATENT), config.integer("o_groups", 8)
    if num_heads % groups:
        raise config.error("o_groups", f"must divide num_attention_heads ({num_heads})")
    rope_dim, index_dim = int(head_dim * _rotated(config)), config.integer("index_head_dim", 128, high=MAX_INDEX_DIM)
    if index_dim < rope_dim:
        raise config.error("index_head_dim", f"must be at least {rope_dim}, the part of a head that is rotated")
    index = IndexShape(
        num_heads=config.integer("index_n_heads", 64, high=MAX_INDEX_HEADS),
        dim=index_dim,
        top=config.integer("index_topk", 512, high=MAX_TOP),
        interleaved=True,
    )
    return CompressedShape(
        num_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=config.integer("q_lora_rank", 1024, high=MAX_LATENT),
        groups=groups,
        group_rank=config.integer("o_lora_rank", 1024, high=MAX_LATENT),
        index=index,
    )


def _rotated(config: Fields) -> float:
    """Returns the part of a head that is rotated."""
    if config.has("partial_rotary_factor"):
        return config.number("partial_rotary_factor")
    if config.has("qk_rope_head_dim"):
        return config.integer("qk_rope_head_dim") / config.integer("head_dim", 512, high=MAX_LATENT)
    return ROTATED


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    """Returns that of layers without compression, and that of the others and their entries, which alone is scaled."""
    theta, own = config.number("rope_theta", theta, low=1.0), config.number("compress_rope_theta", 160000.0, low=1.0)
    rotated, nested = _rotated(config), config.child("rope_parameters")
    main, scaled = Fields({}, config.source), config.child("rope_scaling") if config.has("rope_scaling") else nested
    if nested.has("main") and nested.has("compress"):
        main, scaled = nested.child("main"), nested.child("compress")
    else:
        scaled = scaled.with_values({"rope_theta": own})
    compress = read_rope_of(scaled, config, own, rotated)
    if isinstance(compress.scaling, YarnScaling) and compress.scaling.attention_factor is None:
        compress = replace(compress, scaling=replace(compress.scaling, attention_factor=1.0))
    return read_rope_of(main, config, theta, rotated), compress


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    config.one_of("scoring_func", "sqrtsoftplus")
    config.one_of("topk_method", "noaux_tc")
    config.one_of("hidden_act", "silu")
    config.only("norm_topk_prob", True)
    kinds = config.texts("mlp_layer_types")
    if not kinds:
        by_table = min(num_layers, config.integer("num_hash_layers", 3, low=0))
        kinds = [BY_TABLE] * by_table + [BY_SCORE] * (num_layers - by_table)
    if len(kinds) < num_layers or not set(kinds) <= {BY_TABLE, BY_SCORE}:
        raise config.error("mlp_layer_types", f"must have num_hidden_layers ({num_layers}) of {BY_TABLE} or {BY_SCORE}")
    routing = Routing(
        num_experts=read_num_experts(config, "n_routed_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok", 6),
        score="sqrt softplus",
        bias=True,
        renormalize=True,
        scaling=config.number("routed_scaling_factor", 1.5),
    )
    size = config.integer("moe_intermediate_size", 2048)
    return MoeConfig(
        layers=tuple(range(num_layers)),
        intermediate_size=size,
        routing=checked(config, routing),
        shared_size=size * config.integer("n_shared_experts", 1),
        gate=ClampedSwiglu(alpha=1.0, limit=config.number("swiglu_limit", 10.0), offset=0.0),
        by_table=tuple(at for at, kind in enumerate(kinds[:num_layers]) if kind == BY_TABLE),
    )


def _traits(config: Fields) -> Traits:
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    streams = Streams(
        count=config.integer("hc_mult", 4, high=MAX_STREAMS),
        iterations=config.integer("hc_sinkhorn_iters", 20),
        eps=config.number("hc_eps", 1e-6),
    )
    return Traits(attention_sinks=True, streams=streams)


DEEPSEEK_V4 = ModelDefinition(
    architecture="DeepseekV4ForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=_ropes,
    compressed=_shape,
    moe=_moe,
    head=None,
    head_dim=512,
    mlp_field="moe_intermediate_size",
    names=TensorNames(
        other_lm_head="head",
        router="ffn.gate",
        router_bias="ffn.gate.bias",
        fused_router="ffn.gate",
        fused_router_bias="ffn.gate.bias",
        router_table="ffn.gate.tid2eid",
        experts="ffn.experts",
        expert_projections=("w1", "w3", "w2"),
        fused_experts=(("ffn.experts.gate_up_proj",), ("ffn.experts.down_proj",)),
        shared_experts="ffn.shared_experts",
        shared_projections=("w1", "w3", "w2"),
        fused_shared="ffn.shared_experts.gate_up_proj",
        attention_norm="attn_norm",
        mlp_norm="ffn_norm",
        left_out=("mtp.", "model.mtp."),
    ),
)
