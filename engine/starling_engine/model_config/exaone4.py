"""EXAONE 4: norms behind attention and MLP alone; where some layers slide, only these are rotated."""

from starling_engine.model_config.definition import ModelDefinition, fixed_traits, patterned_windows, written_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

DEFAULT_PATTERN = 4


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else all but the last of each pattern ("LLLG", or its length) do."""
    window = written_window(config)
    pattern = config.get("sliding_window_pattern")
    length = len(pattern) if isinstance(pattern, str) else config.integer("sliding_window_pattern", DEFAULT_PATTERN, low=0)
    windows = patterned_windows(config, num_layers, window, length)
    return tuple(LayerConfig(window=each, rope=0 if each or not window else None, norms="after") for each in windows)


EXAONE4 = ModelDefinition(
    architecture="Exaone4ForCausalLM", traits=fixed_traits(Traits(qk_norm="head")), layers=_layers, rms_eps=1e-5
)
