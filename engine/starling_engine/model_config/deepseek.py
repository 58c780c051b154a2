"""DeepSeek-V2, V2-Lite, V3 (and R1) and V3.2: multi-head latent attention, and experts, some of which every token takes.

V3.2 has an indexer in each layer, which chooses the tokens that queries attend to.
"""

from dataclasses import replace
from typing import Literal

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mla_shape import IndexShape, MlaShape
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.traits import Traits

DEFAULT_KV_RANK, DEFAULT_NOPE_DIM, DEFAULT_ROPE_DIM, DEFAULT_VALUE_DIM = 512, 128, 64, 128
MAX_INDEX_HEADS, MAX_INDEX_DIM, MAX_TOP, MAX_LATENT = 4096, 1 << 16, 1 << 20, 1 << 14
"""More than any model has; a config with more is damaged."""
FEED_FORWARDS = ("dense", "sparse")
INDEXED = "indexed_attention"


def read_latents(
    config: Fields, num_heads: int, *, interleaved: bool, nope_dim: int = DEFAULT_NOPE_DIM, value_dim: int = DEFAULT_VALUE_DIM
) -> MlaShape:
    """Reads the sizes of latent attention. Raises ModelError for those that it cannot have.

    The last two are defaults of a head's part without rotation, and of its values.
    """
    if config.integer("num_key_value_heads", num_heads) != num_heads:
        raise config.error("num_key_value_heads", f"must be num_attention_heads ({num_heads}): latents serve all heads")
    rope_dim = config.integer("qk_rope_head_dim", DEFAULT_ROPE_DIM, high=MAX_LATENT)
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "must be even to be rotated")
    return MlaShape(
        num_heads=num_heads,
        q_rank=config.integer("q_lora_rank", 0, low=0, high=MAX_LATENT),
        kv_rank=config.integer("kv_lora_rank", DEFAULT_KV_RANK, high=MAX_LATENT),
        nope_dim=config.integer("qk_nope_head_dim", nope_dim, high=MAX_LATENT),
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim", value_dim, high=MAX_LATENT),
        interleaved=interleaved,
    )


def with_indexer(config: Fields, shape: MlaShape, *, q_rank: int, heads: int, interleaved: bool) -> MlaShape:
    """Adds what the config says of the indexer; the others are defaults. Raises ModelError for sizes that it cannot have."""
    dim = config.integer("index_head_dim", 128, high=MAX_INDEX_DIM)
    if dim < shape.rope_dim:
        raise config.error("index_head_dim", f"must be at least qk_rope_head_dim ({shape.rope_dim}), the part that is rotated")
    index = IndexShape(
        num_heads=config.integer("index_n_heads", heads, high=MAX_INDEX_HEADS),
        dim=dim,
        top=config.integer("index_topk", 2048, high=MAX_TOP),
        interleaved=config.boolean("indexer_rope_interleave", interleaved),
    )
    # The indexer's queries are made of compressed ones.
    return replace(shape, q_rank=config.integer("q_lora_rank", q_rank, high=MAX_LATENT), index=index)


def indexed_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that all have an indexer. Raises for a list of them that says otherwise."""
    kinds = config.texts("layer_types")
    if kinds and len(kinds) != num_layers:
        raise config.error("layer_types", f"must have num_hidden_layers ({num_layers}) entries")
    for kind in kinds:
        if kind != INDEXED:
            raise UnsupportedModel(f"{config.source}: layer_types: {kind!r} is not supported; supported: {INDEXED}")
    return (LayerConfig(),) * num_layers


def listed_expert_layers(config: Fields, num_layers: int) -> tuple[int, ...] | None:
    """Returns the layers with experts by `mlp_layer_types`; None where the config has no such list."""
    kinds = config.texts("mlp_layer_types")
    if not kinds:
        return None
    if len(kinds) != num_layers or not set(kinds) <= set(FEED_FORWARDS):
        raise config.error("mlp_layer_types", f"must have num_hidden_layers ({num_layers}) of {' or '.join(FEED_FORWARDS)}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _v2_shape(config: Fields, num_heads: int) -> MlaShape:
    return read_latents(config, num_heads, interleaved=True)


def _v3_shape(config: Fields, num_heads: int) -> MlaShape:
    return read_latents(config, num_heads, interleaved=config.boolean("rope_interleave", True))


def _v32_shape(config: Fields, num_heads: int) -> MlaShape:
    config.only("rope_interleave", True)
    shape = read_latents(config, num_heads, interleaved=True)
    return with_indexer(config, shape, q_rank=1536, heads=64, interleaved=False)


def _v2_traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False))


def latent_traits(config: Fields) -> Traits:
    """Returns the traits of V3 and its kin."""
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, num_draft_layers=config.integer("num_nextn_predict_layers", 0, low=0))


def _v2_moe(config: Fields, num_layers: int) -> MoeConfig | None:
    """Reads V2's routing: softmax over all experts, then the best of all, or of the groups with the best experts."""
    layers = _expert_layers(config, num_layers, default_first=0)
    if not layers:
        return None
    method = config.one_of("topk_method", "greedy", "group_limited_greedy")
    config.one_of("scoring_func", "softmax")
    if config.boolean("norm_topk_prob", False):
        # The authors' code then leaves routed_scaling_factor out, others do not; no published model has it.
        raise UnsupportedModel(f"{config.source}: norm_topk_prob: true is not supported for this architecture; supported: false")
    grouped = method == "group_limited_greedy"
    routing = Routing(
        num_experts=read_num_experts(config, "n_routed_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        num_groups=config.integer("n_group") if grouped else 1,
        top_groups=config.integer("topk_group") if grouped else 1,
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    return _moe(config, layers, routing)


def _v3_moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return read_sigmoid_moe(config, num_layers, first=3, groups=(8, 4), scaling=2.5)


def _v32_moe(config: Fields, num_layers: int) -> MoeConfig | None:
    listed = listed_expert_layers(config, num_layers)
    return read_sigmoid_moe(config, num_layers, first=3, groups=(8, 4), scaling=2.5, layers=listed)


def read_sigmoid_moe(
    config: Fields,
    num_layers: int,
    *,
    first: int,
    groups: tuple[int, int],
    scaling: float,
    layers: tuple[int, ...] | None = None,
) -> MoeConfig | None:
    """Reads V3's routing: a sigmoid for each expert, with a learnt bias.

    The others are as in `read_experts`.
    """
    return read_experts(config, num_layers, first=first, groups=groups, score="sigmoid", scaling=scaling, layers=layers)


def read_experts(
    config: Fields,
    num_layers: int,
    *,
    first: int,
    groups: tuple[int, int],
    score: Literal["softmax", "sigmoid"],
    scaling: float,
    layers: tuple[int, ...] | None = None,
) -> MoeConfig | None:
    """Reads experts in groups, of which those with the best two experts are best. Sigmoids have a learnt bias.

    The others are defaults: the first layer with experts, the groups and how many of them are chosen, and the scaling; or the
    layers with experts, of a config that lists them.
    """
    layers = _expert_layers(config, num_layers, first) if layers is None else layers
    if not layers:
        return None
    config.one_of("topk_method", "noaux_tc")
    config.one_of("scoring_func", score)
    routing = Routing(
        num_experts=read_num_experts(config, "n_routed_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        score=score,
        bias=score == "sigmoid",
        num_groups=config.integer("n_group", groups[0]),
        top_groups=config.integer("topk_group", groups[1]),
        group_score="best two",
        renormalize=config.boolean("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", scaling),
    )
    return _moe(config, layers, routing)


def _expert_layers(config: Fields, num_layers: int, default_first: int) -> tuple[int, ...]:
    """Returns the layers from `first_k_dense_replace` on whose index `moe_layer_freq` divides."""
    first = config.integer("first_k_dense_replace", default_first, low=0)
    step = config.integer("moe_layer_freq", 1)
    return tuple(layer for layer in range(first, num_layers) if layer % step == 0)


def _moe(config: Fields, layers: tuple[int, ...], routing: Routing) -> MoeConfig:
    size = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", 0, low=0)
    return MoeConfig(layers=layers, intermediate_size=size, routing=checked(config, routing), shared_size=shared * size)


DEEPSEEK_V2 = ModelDefinition(architecture="DeepseekV2ForCausalLM", traits=_v2_traits, mla=_v2_shape, moe=_v2_moe)
DEEPSEEK_V3 = ModelDefinition(architecture="DeepseekV3ForCausalLM", traits=latent_traits, mla=_v3_shape, moe=_v3_moe)
DEEPSEEK_V3_2 = ModelDefinition(
    architecture="DeepseekV32ForCausalLM", traits=latent_traits, layers=indexed_layers, mla=_v32_shape, moe=_v32_moe
)
