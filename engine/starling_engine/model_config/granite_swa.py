"""Granite Swash: Granite 3 with windows in most layers and attention sinks.

Layers may rotate by bases of their own, or not at all.
"""

from dataclasses import replace

from starling_engine.model_config.definition import listed_windows
from starling_engine.model_config.fields import Fields, is_number
from starling_engine.model_config.granite import GRANITE, granite_traits
from starling_engine.model_config.granite_moe import GRANITE_MOE_SHARED
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.rope import RopeConfig, read_rope
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, PATTERN = 128, 4


def _traits(config: Fields) -> Traits:
    return replace(granite_traits(config), attention_sinks=True)


def _bases(config: Fields) -> list[float]:
    """Returns the layers' bases; 0 is of one that does not rotate. Without a list all layers have that of the model."""
    bases = config.get("layer_rope_theta")
    if bases is None:
        return []
    if not isinstance(bases, list) or not all(is_number(each) and (not each or each >= 1) for each in bases):
        raise config.error("layer_rope_theta", "must be a list of numbers, 0 or at least 1")
    return [float(each) for each in bases]


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else all but every fourth do, from the second on."""
    window, bases = config.integer("sliding_window", DEFAULT_WINDOW), _bases(config)
    windows = listed_windows(config, num_layers, window) or tuple(window if at % PATTERN else 0 for at in range(num_layers))
    if not bases:
        return tuple(LayerConfig(window=each) for each in windows)
    if len(bases) != num_layers:
        raise config.error("layer_rope_theta", f"must have num_hidden_layers ({num_layers}) entries")
    places: dict[float, int | None] = {0.0: None, **{base: at for at, base in enumerate(_distinct(bases))}}
    return tuple(LayerConfig(window=each, rope=places[base]) for each, base in zip(windows, bases, strict=True))


def _distinct(bases: list[float]) -> list[float]:
    return sorted({base for base in bases if base})


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    rope, bases = read_rope(config, theta), _bases(config)
    return tuple(replace(rope, theta=base) for base in _distinct(bases)) if bases else (rope,)


GRANITE_SWA = replace(
    GRANITE,
    architecture="GraniteSWAForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=_ropes,
    rms_eps=1e-5,
    tie_word_embeddings=True,
)
GRANITE_MOE_SWA = replace(GRANITE_MOE_SHARED, architecture="GraniteMoeSWAForCausalLM", traits=_traits, layers=_layers, ropes=_ropes)
