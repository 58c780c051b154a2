"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; a sliding window in the upper layers, if switched on."""

from starling_engine.model_config.definition import ModelDefinition, fixed_traits, listed_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def qwen_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else those from `max_window_layers` on, if `use_sliding_window` is set."""
    slides = config.boolean("use_sliding_window", False)
    window = config.integer("sliding_window", DEFAULT_WINDOW) if slides else 0
    listed = listed_windows(config, num_layers, window)
    if listed is not None:
        return with_windows(listed)
    first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, low=0)
    return with_windows(window if layer >= first else 0 for layer in range(num_layers))


QWEN2 = ModelDefinition(architecture="Qwen2ForCausalLM", traits=fixed_traits(Traits(qkv_bias=True)), layers=qwen_layers)
