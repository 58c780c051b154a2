"""DeepSeek-V2, V2-Lite and V3 (and R1): multi-head latent attention, and experts, some of which every token takes."""

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.traits import Traits

DEFAULT_KV_RANK, DEFAULT_NOPE_DIM, DEFAULT_ROPE_DIM, DEFAULT_VALUE_DIM = 512, 128, 64, 128


def read_latents(config: Fields, num_heads: int, *, interleaved: bool) -> MlaShape:
    """Reads the sizes of latent attention. Raises ModelError for those that it cannot have."""
    if config.integer("num_key_value_heads", num_heads) != num_heads:
        raise config.error("num_key_value_heads", f"must be num_attention_heads ({num_heads}): latents serve all heads")
    rope_dim = config.integer("qk_rope_head_dim", DEFAULT_ROPE_DIM)
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "must be even to be rotated")
    return MlaShape(
        num_heads=num_heads,
        q_rank=config.integer("q_lora_rank", 0, low=0),
        kv_rank=config.integer("kv_lora_rank", DEFAULT_KV_RANK),
        nope_dim=config.integer("qk_nope_head_dim", DEFAULT_NOPE_DIM),
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim", DEFAULT_VALUE_DIM),
        interleaved=interleaved,
    )


def _v2_shape(config: Fields, num_heads: int) -> MlaShape:
    return read_latents(config, num_heads, interleaved=True)


def _v3_shape(config: Fields, num_heads: int) -> MlaShape:
    return read_latents(config, num_heads, interleaved=config.boolean("rope_interleave", True))


def _v2_traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False))


def _v3_traits(config: Fields) -> Traits:
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


def read_sigmoid_moe(
    config: Fields,
    num_layers: int,
    *,
    first: int,
    groups: tuple[int, int],
    scaling: float,
    layers: tuple[int, ...] | None = None,
) -> MoeConfig | None:
    """Reads V3's routing: a sigmoid for each expert, with a learnt bias, in the groups whose best two experts are best.

    The others are defaults: the first layer with experts, the groups and how many of them are chosen, and the scaling; or the
    layers with experts, of a config that lists them.
    """
    layers = _expert_layers(config, num_layers, first) if layers is None else layers
    if not layers:
        return None
    config.one_of("topk_method", "noaux_tc")
    config.one_of("scoring_func", "sigmoid")
    routing = Routing(
        num_experts=read_num_experts(config, "n_routed_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        score="sigmoid",
        bias=True,
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
DEEPSEEK_V3 = ModelDefinition(architecture="DeepseekV3ForCausalLM", traits=_v3_traits, mla=_v3_shape, moe=_v3_moe)
