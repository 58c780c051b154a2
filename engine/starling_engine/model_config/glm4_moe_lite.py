"""GLM-4.7-Flash: DeepSeek-V3's latents and experts in other sizes."""

from starling_engine.model_config.deepseek import latent_traits, listed_expert_layers, read_latents, read_sigmoid_moe
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig


def _shape(config: Fields, num_heads: int) -> MlaShape:
    interleaved = config.boolean("rope_interleave", True)
    return read_latents(config, num_heads, interleaved=interleaved, nope_dim=192, value_dim=256)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    listed = listed_expert_layers(config, num_layers)
    return read_sigmoid_moe(config, num_layers, first=1, groups=(1, 1), scaling=1.8, layers=listed)


GLM4_MOE_LITE = ModelDefinition(architecture="Glm4MoeLiteForCausalLM", traits=latent_traits, mla=_shape, moe=_moe, rms_eps=1e-5)
