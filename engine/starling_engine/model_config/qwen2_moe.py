"""Qwen1.5 and Qwen2 with experts (A2.7B, 57B-A14B): Qwen2's attention, experts, and a shared one behind a gate of its own."""

from dataclasses import replace

from starling_engine.model_config.definition import ModelDefinition, TensorNames, listed_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.qwen2 import DEFAULT_MAX_WINDOW_LAYERS, DEFAULT_WINDOW
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(shared_experts="mlp.shared_expert")


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else every second one below `max_window_layers`, if it is switched on."""
    slides = config.boolean("use_sliding_window", False)
    window = config.integer("sliding_window", DEFAULT_WINDOW) if slides else 0
    end = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, low=0)
    listed = listed_windows(config, num_layers, window)
    return with_windows(listed or (0 if layer % 2 or layer >= end else window for layer in range(num_layers)))


def read_sparse_moe(config: Fields, num_layers: int, *, renormalize: bool = False) -> MoeConfig | None:
    """Reads the experts: every `decoder_sparse_step`-th layer has some, except those in `mlp_only_layers`.

    `renormalize` is the default of norm_topk_prob.
    """
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
    if not layers:
        return None
    routing = Routing(
        num_experts=read_num_experts(config, "num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=config.boolean("norm_topk_prob", renormalize),
    )
    return MoeConfig(layers=layers, intermediate_size=config.integer("moe_intermediate_size"), routing=checked(config, routing))


def read_shared_moe(config: Fields, num_layers: int, *, renormalize: bool = False) -> MoeConfig | None:
    """Does as `read_sparse_moe`, and reads the expert that all tokens share, behind a gate of its own."""
    moe = read_sparse_moe(config, num_layers, renormalize=renormalize)
    return moe and replace(moe, shared_size=config.integer("shared_expert_intermediate_size"), shared_gate=True)


def _traits(config: Fields) -> Traits:
    return Traits(qkv_bias=config.boolean("qkv_bias", True))


QWEN2_MOE = ModelDefinition(architecture="Qwen2MoeForCausalLM", traits=_traits, layers=_layers, moe=read_shared_moe, names=NAMES)
