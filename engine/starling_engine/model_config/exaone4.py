"""EXAONE 4: norms behind attention and MLP alone; where some layers slide, only these are rotated.

K-EXAONE has norms before both parts, and DeepSeek-V3's experts behind the first layers.
"""

from dataclasses import replace

from starling_engine.model_config.deepseek import listed_expert_layers, read_sigmoid_moe
from starling_engine.model_config.definition import ModelDefinition, TensorNames, fixed_traits, patterned_windows, written_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.traits import Traits

DEFAULT_PATTERN = 4


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else all but the last of each pattern ("LLLG", or its length) do."""
    window = written_window(config)
    pattern = config.get("sliding_window_pattern")
    length = len(pattern) if isinstance(pattern, str) else config.integer("sliding_window_pattern", DEFAULT_PATTERN, low=0)
    windows = patterned_windows(config, num_layers, window, length)
    return tuple(LayerConfig(window=each, rope=0 if each or not window else None, norms="after") for each in windows)


def _moe_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    return tuple(replace(layer, norms="before") for layer in _layers(config, num_layers))


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    listed = listed_expert_layers(config, num_layers)
    return read_sigmoid_moe(config, num_layers, first=1, groups=(1, 1), scaling=2.5, layers=listed)


EXAONE4 = ModelDefinition(
    architecture="Exaone4ForCausalLM", traits=fixed_traits(Traits(qk_norm="head")), layers=_layers, rms_eps=1e-5
)
EXAONE_MOE = replace(
    EXAONE4,
    architecture="ExaoneMoeForCausalLM",
    layers=_moe_layers,
    moe=_moe,
    field_names={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    names=TensorNames(
        router_bias="mlp.e_score_correction_bias", fused_router_bias="mlp.gate.e_score_correction_bias", left_out=("mtp.",)
    ),
)
