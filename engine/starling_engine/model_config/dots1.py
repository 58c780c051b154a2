"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts behind the first layers."""

from starling_engine.model_config.deepseek import read_sigmoid_moe
from starling_engine.model_config.definition import ModelDefinition, listed_windows, written_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.qwen3 import qwen3_traits


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else those from `max_window_layers` on, if there is a window."""
    window = written_window(config)
    first = config.integer("max_window_layers", num_layers, low=0)
    listed = listed_windows(config, num_layers, window)
    return with_windows(listed or (window if layer >= first else 0 for layer in range(num_layers)))


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return read_sigmoid_moe(config, num_layers, first=0, groups=(1, 1), scaling=1.0)


DOTS1 = ModelDefinition(
    architecture="Dots1ForCausalLM", traits=qwen3_traits, layers=_layers, moe=_moe, defaults={"norm_topk_prob": False}
)
