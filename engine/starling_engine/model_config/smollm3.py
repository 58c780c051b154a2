"""SmolLM3: Llama, in which every fourth layer rotates nothing (NoPE)."""

from starling_engine.model_config.definition import ModelDefinition, listed_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

DEFAULT_INTERVAL = 4


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that are rotated by `no_rope_layers`, 1 for yes; the others slide, if `use_sliding_window` is set."""
    interval = config.integer("no_rope_layer_interval", DEFAULT_INTERVAL)
    rotated = config.integers("no_rope_layers") or tuple(int((layer + 1) % interval > 0) for layer in range(num_layers))
    if len(rotated) < num_layers:
        raise config.error("no_rope_layers", f"must have num_hidden_layers ({num_layers}) entries")
    slides = config.boolean("use_sliding_window", False) and config.has("sliding_window")
    window = config.integer("sliding_window") if slides else 0
    windows = listed_windows(config, num_layers, window) or tuple(0 if each else window for each in rotated[:num_layers])
    return tuple(LayerConfig(window=w, rope=0 if each else None) for w, each in zip(windows, rotated, strict=False))


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False))


SMOLLM3 = ModelDefinition(
    architecture="SmolLM3ForCausalLM", traits=_traits, layers=_layers, rope_theta=2e6, tie_word_embeddings=True
)
