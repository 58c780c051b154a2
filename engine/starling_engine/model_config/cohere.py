"""Command R and A (Cohere): attention and MLP side by side behind one LayerNorm; heads rotate in pairs."""

from dataclasses import replace

from starling_engine.model_config.definition import ModelDefinition, patterned_windows, same_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, DEFAULT_PATTERN = 4096, 4
DEFAULT_SCALE = 0.0625


def _traits(config: Fields) -> Traits:
    config.only("use_qk_norm", False, of="Command R+")
    scale = config.number("logit_scale", DEFAULT_SCALE)
    if not scale:
        raise config.error("logit_scale", "must be above 0")
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, norm="layer", paired_rope=True, logit_divisor=1 / scale)


def _cohere2_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else all but every fourth do. Those that see all tokens are not rotated."""
    window, pattern = config.integer("sliding_window", DEFAULT_WINDOW), config.integer("sliding_window_pattern", DEFAULT_PATTERN)
    windows = patterned_windows(config, num_layers, window, pattern)
    return tuple(LayerConfig(window=each, rope=0 if each else None, norms="parallel") for each in windows)


COHERE = ModelDefinition(
    architecture="CohereForCausalLM",
    traits=_traits,
    layers=same_layers("parallel"),
    rms_eps=1e-5,
    eps_field="layer_norm_eps",
    length_field="model_max_length",  # Command R writes 8192 for the other, which it was not trained with
    rope_theta=5e5,
    tie_word_embeddings=True,
)
COHERE2 = replace(COHERE, architecture="Cohere2ForCausalLM", layers=_cohere2_layers, rope_theta=1e4)
