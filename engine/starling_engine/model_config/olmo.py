"""OLMo 2 and 3: norms behind attention and MLP alone, queries and keys normalised over all heads; 3 has windows."""

from starling_engine.model_config.definition import ModelDefinition, patterned_windows, same_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.rope import RopeConfig, read_ropes
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, DEFAULT_PATTERN = 4096, 4


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, qk_norm="width")


def _olmo3_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else all but every fourth do. These have the second rotary embedding."""
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    windows = patterned_windows(config, num_layers, window, DEFAULT_PATTERN)
    return tuple(LayerConfig(window=each, rope=1 if each else 0, norms="after") for each in windows)


def _olmo3_ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    return read_ropes(config, theta)


OLMO2 = ModelDefinition(architecture="Olmo2ForCausalLM", traits=_traits, layers=same_layers("after"), rms_eps=1e-5)
OLMO3 = ModelDefinition(
    architecture="Olmo3ForCausalLM", traits=_traits, layers=_olmo3_layers, ropes=_olmo3_ropes, rope_theta=5e5, rms_eps=1e-5
)
