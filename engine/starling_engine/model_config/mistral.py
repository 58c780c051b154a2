"""Mistral and Ministral: Llama with a sliding window in all layers, or in those that `layer_types` names."""

from starling_engine.model_config.definition import ModelDefinition, Traits, listed_windows
from starling_engine.model_config.fields import Fields


def _windows(config: Fields, num_layers: int) -> tuple[int, ...]:
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    return listed_windows(config, num_layers, window) or (window,) * num_layers


def _traits(_config: Fields) -> Traits:
    return Traits()


MISTRAL = ModelDefinition(architecture="MistralForCausalLM", traits=_traits, windows=_windows)
MINISTRAL = ModelDefinition(architecture="MinistralForCausalLM", traits=_traits, windows=_windows)
