"""SmolLM3: Llama, in which every fourth layer rotates nothing (NoPE)."""

from starling_engine.model_config.definition import ModelDefinition, listed_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

DEFAULT_INTERVAL = 4


def rotated_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns 1 for each layer that is rotated, by `no_rope_layers`; else 0 for every fourth, or at another interval."""
    interval = config.integer("no_rope_layer_interval", DEFAULT_INTERVAL)
    rotated = config.integers("no_rope_layers") or tuple(int((layer + 1) % interval > 0) for layer in range(num_layers))
    if len(rotated) < num_layers:
        raise config.error("no_rope_layers", f"must have num_hidden_layers ({num_layers}) entries")
    return rotated[:num_layers]


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which those that are not rotated slide, if `use_sliding_window` is set."""
    rotated = rotated_layers(config, num_layers)
    slides = config.boolean("use_sliding_window", False) and config.has("sliding_window")
    window = config.integer("sliding_window") if slides else 0
    windows = listed_windows(config, num_layers, window) or tuple(0 if each else window for each in rotated)
    return tuple(LayerConfig(window=w, rope=0 if each else None) for w, each in zip(windows, rotated, strict=True))


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False))


SMOLLM3 = ModelDefinition(
    architecture="SmolLM3ForCausalLM", traits=_traits, layers=_layers, rope_theta=2e6, tie_word_embeddings=True
)
