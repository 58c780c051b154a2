"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; a sliding window in the upper layers, if switched on."""

from starling_engine.model_config.definition import ModelDefinition, Traits, listed_windows
from starling_engine.model_config.fields import Fields

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def qwen_windows(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the windows by `layer_types`. Else layers from `max_window_layers` on slide, if `use_sliding_window` is set."""
    slides = config.boolean("use_sliding_window", False)
    window = config.integer("sliding_window", DEFAULT_WINDOW) if slides else 0
    listed = listed_windows(config, num_layers, window)
    if listed is not None:
        return listed
    first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, low=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _traits(_config: Fields) -> Traits:
    return Traits(qkv_bias=True)


QWEN2 = ModelDefinition(architecture="Qwen2ForCausalLM", traits=_traits, windows=qwen_windows)
