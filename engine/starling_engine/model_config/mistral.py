"""Mistral and Ministral: Llama with a sliding window in all layers, or in those that `layer_types` names.

Queries of Ministral 3 have a temperature, which rises with the length of training (`original_max_position_embeddings`).
"""

from dataclasses import replace

from starling_engine.model_config.definition import ModelDefinition, listed_windows, written_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, Temperature, with_windows


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    window = written_window(config)
    return with_windows(listed_windows(config, num_layers, window) or (window,) * num_layers)


def _layers3(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    temperature = read_temperature(config)
    return tuple(replace(layer, temperature=temperature) for layer in _layers(config, num_layers))


def read_temperature(config: Fields) -> Temperature | None:
    """Reads that of queries, where the rotary embedding's fields have its `llama_4_scaling_beta`."""
    rope = config.child("rope_parameters")
    if not rope.has("llama_4_scaling_beta"):
        return None
    return Temperature(step=rope.integer("original_max_position_embeddings"), scale=rope.number("llama_4_scaling_beta"), first=0)


MISTRAL = ModelDefinition(architecture="MistralForCausalLM", layers=_layers)
MINISTRAL = ModelDefinition(architecture="MinistralForCausalLM", layers=_layers)
MISTRAL3 = ModelDefinition(architecture="Ministral3ForCausalLM", layers=_layers3)
