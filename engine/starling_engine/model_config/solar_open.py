"""Solar Open: Llama's attention; DeepSeek-V3's experts in all layers."""

from starling_engine.model_config.deepseek import read_sigmoid_moe
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    return Traits(qkv_bias=config.boolean("attention_bias", False))


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return read_sigmoid_moe(config, num_layers, first=0, groups=(1, 1), scaling=1.0, layers=tuple(range(num_layers)))


SOLAR_OPEN = ModelDefinition(
    architecture="SolarOpenForCausalLM",
    traits=_traits,
    moe=_moe,
    head_dim=128,
    rope_theta=1e6,
    rms_eps=1e-5,
)
