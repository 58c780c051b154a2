"""CWM, Meta's code world model: Llama with windows in three of four layers."""

from starling_engine.model_config.definition import ModelDefinition, listed_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows

DEFAULT_WINDOW, PATTERN = 8192, 4


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else all but every fourth do, from the second on."""
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    listed = listed_windows(config, num_layers, window)
    return with_windows(listed or (window if layer % PATTERN else 0 for layer in range(num_layers)))


CWM = ModelDefinition(architecture="CwmForCausalLM", layers=_layers, rope_theta=1e6, rms_eps=1e-5)
