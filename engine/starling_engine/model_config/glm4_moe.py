"""GLM-4.5, 4.6 and 4.7: half of each head is rotated; DeepSeek-V3's experts."""

from starling_engine.model_config.deepseek import read_sigmoid_moe
from starling_engine.model_config.definition import ModelDefinition, partial_rope
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    return Traits(
        qkv_bias=config.boolean("attention_bias", False),
        qk_norm="head" if config.boolean("use_qk_norm", False) else None,
        num_draft_layers=config.integer("num_nextn_predict_layers", 1, low=0),
    )


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return read_sigmoid_moe(config, num_layers, first=1, groups=(1, 1), scaling=1.0)


GLM4_MOE = ModelDefinition(architecture="Glm4MoeForCausalLM", traits=_traits, ropes=partial_rope(0.5), moe=_moe, rms_eps=1e-5)
