"""LFM2 (arXiv 2511.23404), dense and with experts: most layers are gated short convolutions, the others attend."""

from collections.abc import Mapping
from dataclasses import replace

from starling_engine.model_config.definition import ModelDefinition, TensorNames, fixed_traits, written_size
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import hybrid_layers
from starling_engine.model_config.layer import LayerConfig, Mixer
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.short_conv import read_short_conv
from starling_engine.model_config.traits import Traits

MIXERS: Mapping[str, Mixer] = {"conv": "short convolution", "full_attention": "attention"}
FIELD_NAMES = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}
NAMES = TensorNames(
    norm="model.embedding_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    fused_router="feed_forward.gate",
    router_bias="feed_forward.expert_bias",
    fused_router_bias="feed_forward.expert_bias",
    experts="feed_forward.experts",
    expert_projections=("w1", "w3", "w2"),
    fused_experts=(("feed_forward.experts.gate_up_proj",), ("feed_forward.experts.down_proj",)),
)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which, without `layer_types`, those in `full_attn_idxs` attend; without either, all do."""
    attending = config.integers("full_attn_idxs") if config.has("full_attn_idxs") else range(num_layers)
    written = ["full_attention" if layer in attending else "conv" for layer in range(num_layers)]
    return hybrid_layers(config, num_layers, written, mixers=MIXERS)


def _mlp_size(config: Fields, size: int) -> int:
    """Returns the width of a plain MLP: two thirds of what is written, by a factor, as a whole multiple."""
    if not config.boolean("block_auto_adjust_ff_dim", True):
        return size
    factor, multiple = config.number("block_ffn_dim_multiplier", 1.0), config.integer("block_multiple_of", 256)
    size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    if size < 1:
        raise config.error("block_ffn_dim_multiplier", "must leave a width of at least 1")
    return size


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    """Reads experts, which all layers have but the first `num_dense_layers`."""
    routing = Routing(
        num_experts=read_num_experts(config, "num_experts"),
        top_k=config.integer("num_experts_per_tok", 4),
        score="sigmoid",
        bias=config.boolean("use_expert_bias", True),
        renormalize=config.boolean("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    first = config.integer("num_dense_layers", 2, low=0)
    size = config.integer("moe_intermediate_size")
    return MoeConfig(layers=tuple(range(first, num_layers)), intermediate_size=size, routing=checked(config, routing))


LFM2 = ModelDefinition(
    architecture="Lfm2ForCausalLM",
    traits=fixed_traits(Traits(qk_norm="head")),
    layers=_layers,
    short_conv=read_short_conv,
    rope_theta=1e6,
    rms_eps=1e-5,
    eps_field="norm_eps",
    mlp_size=_mlp_size,
    field_names=FIELD_NAMES,
    tie_word_embeddings=True,
    names=NAMES,
)
LFM2_MOE = replace(LFM2, architecture="Lfm2MoeForCausalLM", moe=_moe, mlp_size=written_size)
