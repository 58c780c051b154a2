"""Mistral and Ministral: Llama with a sliding window in all layers, or in those that `layer_types` names."""

from starling_engine.model_config.definition import ModelDefinition, listed_windows, written_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    window = written_window(config)
    return with_windows(listed_windows(config, num_layers, window) or (window,) * num_layers)


MISTRAL = ModelDefinition(architecture="MistralForCausalLM", layers=_layers)
MINISTRAL = ModelDefinition(architecture="MinistralForCausalLM", layers=_layers)
