"""Gemma 1, 2 and 3 (text): norms by 1 + weight, GELU, scaled embeddings; from 2 on norms around both parts, and windows.

VaultGemma is Gemma 2 without the norms behind both parts.
"""

from dataclasses import replace

from starling_engine.model_config.definition import LENGTH_FIELD, ModelDefinition, TensorNames, patterned_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.rope import LinearScaling, RopeConfig, read_ropes
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, DEFAULT_SCALAR, DEFAULT_PATTERN = 4096, 256.0, 6
MIN_SCALAR = 1e-6
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
AROUND = TensorNames(mlp_norm="pre_feedforward_layernorm")


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, norm="one plus weight", embedding_scale=config.integer("hidden_size") ** 0.5)


def _capped(config: Fields, *, attention: float, logits: float) -> Traits:
    """Returns the traits with a scale of its own, and soft caps with these defaults. A cap of null is none."""
    return replace(
        _traits(config),
        attention_scale=config.number("query_pre_attn_scalar", DEFAULT_SCALAR, low=MIN_SCALAR) ** -0.5,
        attention_cap=_cap(config, "attn_logit_softcapping", attention),
        logit_cap=_cap(config, "final_logit_softcapping", logits),
    )


def _cap(config: Fields, name: str, default: float) -> float:
    return config.number(name, 0.0 if name in config.values else default)


def _gemma2_traits(config: Fields) -> Traits:
    return _capped(config, attention=50.0, logits=30.0)


def _gemma3_traits(config: Fields) -> Traits:
    return replace(_capped(config, attention=0.0, logits=0.0), qk_norm="head")


def _windows(config: Fields, num_layers: int, pattern: int) -> tuple[int, ...]:
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    if config.boolean("use_bidirectional_attention", False):
        window = window // 2 + 1  # of that many tokens half are on each side
    return patterned_windows(config, num_layers, window, pattern)


def _gemma2_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    return with_windows(_windows(config, num_layers, 2), "both")


def _vault_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    return with_windows(_windows(config, num_layers, 2))


def _gemma3_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which those that slide have the second rotary embedding."""
    windows = _windows(config, num_layers, config.integer("sliding_window_pattern", DEFAULT_PATTERN))
    return tuple(LayerConfig(window=window, rope=1 if window else 0, norms="both") for window in windows)


def _gemma3_ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    """Returns both rotary embeddings. The config's longest sequence is the one after scaling."""
    full, sliding = read_ropes(config, theta, LOCAL_THETA)
    if isinstance(full.scaling, LinearScaling) and config.has(LENGTH_FIELD):
        before = int(config.integer(LENGTH_FIELD) / full.scaling.factor)
        full = replace(full, scaling=replace(full.scaling, original_max_position=before))
    return full, sliding


GEMMA = ModelDefinition(
    architecture="GemmaForCausalLM",
    traits=_traits,
    head_dim=256,
    activation="gelu_pytorch_tanh",
    activation_names={"gelu": "gelu_pytorch_tanh"},  # Google's first configs wrote "gelu", and their models were trained with this
    tie_word_embeddings=True,
)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    traits=_gemma2_traits,
    layers=_gemma2_layers,
    activation_names={},
    names=AROUND,
)
VAULT_GEMMA = replace(GEMMA2, architecture="VaultGemmaForCausalLM", layers=_vault_layers)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    traits=_gemma3_traits,
    layers=_gemma3_layers,
    ropes=_gemma3_ropes,
    rope_theta=GLOBAL_THETA,
)
