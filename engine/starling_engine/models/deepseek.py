"""DeepSeek-V2, V2-Lite and V3 (and R1): multi-head latent attention."""

from starling_engine.attention.mla_shape import MlaShape
from starling_engine.errors import UnsupportedModel
from starling_engine.models.definition import ModelDefinition, Traits
from starling_engine.models.fields import Fields

DEFAULT_KV_RANK, DEFAULT_NOPE_DIM, DEFAULT_ROPE_DIM, DEFAULT_VALUE_DIM = 512, 128, 64, 128


def _shape(config: Fields, num_heads: int, *, interleaved: bool) -> MlaShape:
    """Raises ModelError for heads that are no heads of latent attention."""
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
    return _shape(config, num_heads, interleaved=True)


def _v3_shape(config: Fields, num_heads: int) -> MlaShape:
    return _shape(config, num_heads, interleaved=config.boolean("rope_interleave", True))


def _v2_traits(config: Fields) -> Traits:
    _refuse_experts(config, default_first=0)
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False))


def _v3_traits(config: Fields) -> Traits:
    _refuse_experts(config, default_first=3)
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, num_draft_layers=config.integer("num_nextn_predict_layers", 0, low=0))


def _refuse_experts(config: Fields, default_first: int) -> None:
    first, layers = config.integer("first_k_dense_replace", default_first, low=0), config.integer("num_hidden_layers")
    if first < layers:
        raise UnsupportedModel(
            f"{config.source}: first_k_dense_replace: layers from {first} on have experts, which are not supported for this "
            f"architecture; possible: num_hidden_layers ({layers}), all layers dense"
        )


DEEPSEEK_V2 = ModelDefinition(architecture="DeepseekV2ForCausalLM", traits=_v2_traits, mla=_v2_shape)
DEEPSEEK_V3 = ModelDefinition(architecture="DeepseekV3ForCausalLM", traits=_v3_traits, mla=_v3_shape)
