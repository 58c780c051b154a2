"""MiniCPM 1, 2, 4 and 3: multipliers of embeddings, of what parts add, and of logits; 3 has DeepSeek-V2's latents."""

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.deepseek import read_latents
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.traits import Traits

DEFAULT_NOPE_DIM = 64


def _traits(config: Fields) -> Traits:
    """Reads the multipliers, of which all published configs have all three."""
    if config.integer("num_experts", 0, low=0):
        raise UnsupportedModel(f"{config.source}: num_experts above 0 (MiniCPM-MoE) is not supported")
    if config.has("sparse_config"):
        raise UnsupportedModel(f"{config.source}: sparse_config is not supported; supported: null")
    bias = config.boolean("attention_bias", False)
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        embedding_scale=config.number("scale_emb"),
        residual_scale=config.number("scale_depth") / config.integer("num_hidden_layers") ** 0.5,
        logit_divisor=config.integer("hidden_size") / config.integer("dim_model_base"),
    )


def _latents(config: Fields, num_heads: int) -> MlaShape:
    value_dim = config.integer("hidden_size") // num_heads
    return read_latents(config, num_heads, interleaved=False, nope_dim=DEFAULT_NOPE_DIM, value_dim=value_dim)


MINICPM = ModelDefinition(architecture="MiniCPMForCausalLM", traits=_traits, rms_eps=1e-5, tie_word_embeddings=True)
MINICPM3 = ModelDefinition(architecture="MiniCPM3ForCausalLM", traits=_traits, mla=_latents, rms_eps=1e-5, tie_word_embeddings=True)
