"""Qwen3 with experts (30B-A3B, 235B-A22B): Qwen3's attention; most or all of the MLPs are experts."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.qwen2_moe import read_sparse_moe
from starling_engine.model_config.qwen3 import qwen3_traits

DEFAULT_WINDOW = 4096


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers with one window, if it is switched on: only dense models use `max_window_layers`."""
    slides = config.boolean("use_sliding_window", False)
    return with_windows((config.integer("sliding_window", DEFAULT_WINDOW) if slides else 0,) * num_layers)


QWEN3_MOE = ModelDefinition(architecture="Qwen3MoeForCausalLM", traits=qwen3_traits, layers=_layers, moe=read_sparse_moe)
