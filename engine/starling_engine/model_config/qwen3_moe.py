"""Qwen3 with experts (30B-A3B, 235B-A22B): Qwen3's attention; most or all of the MLPs are experts."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.qwen3 import qwen3_traits

DEFAULT_WINDOW = 4096


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers with one window, if it is switched on: only dense models use `max_window_layers`."""
    slides = config.boolean("use_sliding_window", False)
    return with_windows((config.integer("sliding_window", DEFAULT_WINDOW) if slides else 0,) * num_layers)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    """Reads the experts: every `decoder_sparse_step`-th layer has some, except those in `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
    if not layers:
        return None
    routing = Routing(
        num_experts=read_num_experts(config, "num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=config.boolean("norm_topk_prob", False),
    )
    return MoeConfig(layers=layers, intermediate_size=config.integer("moe_intermediate_size"), routing=checked(config, routing))


QWEN3_MOE = ModelDefinition(architecture="Qwen3MoeForCausalLM", traits=qwen3_traits, layers=_layers, moe=_moe)
