"""Mistral 4 (Small 4): DeepSeek's latents, experts that a softmax chooses, and Ministral 3's temperature of queries."""

from starling_engine.model_config.deepseek import latent_traits, read_experts, read_latents
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mistral import read_temperature
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.rope import RopeConfig, read_rope_of


def _shape(config: Fields, num_heads: int) -> MlaShape:
    return read_latents(config, num_heads, interleaved=config.boolean("rope_interleave", True), nope_dim=64)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    return (LayerConfig(temperature=read_temperature(config)),) * num_layers


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    """Returns the rotary embedding. Its share of a head is the latents' rotated part, whatever the field says."""
    return (read_rope_of(config.child("rope_parameters"), config, theta, 1.0),)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return read_experts(config, num_layers, first=0, groups=(1, 1), score="softmax", scaling=1.0)


MISTRAL4 = ModelDefinition(
    architecture="Mistral4ForCausalLM", traits=latent_traits, layers=_layers, ropes=_ropes, mla=_shape, moe=_moe
)
