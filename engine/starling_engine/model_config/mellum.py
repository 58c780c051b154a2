"""Mellum 2: Qwen3 with experts, and windows in some layers, which have a rotary embedding of their own."""

from starling_engine.model_config.deepseek import listed_expert_layers
from starling_engine.model_config.definition import ModelDefinition, TensorNames, listed_windows
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.qwen3 import qwen3_traits
from starling_engine.model_config.rope import RopeConfig, read_ropes

DEFAULT_WINDOW = 1024
GLOBAL_THETA, LOCAL_THETA = 5e5, 1e4


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    windows = listed_windows(config, num_layers, config.integer("sliding_window", DEFAULT_WINDOW)) or (0,) * num_layers
    return tuple(LayerConfig(window=each, rope=1 if each else 0) for each in windows)


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    return read_ropes(config, theta, LOCAL_THETA)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    listed = listed_expert_layers(config, num_layers)
    layers = tuple(range(num_layers)) if listed is None else listed
    if not layers:
        return None
    routing = Routing(
        num_experts=read_num_experts(config, "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok", 8),
        renormalize=config.boolean("norm_topk_prob", True),
    )
    return MoeConfig(layers=layers, intermediate_size=config.integer("moe_intermediate_size"), routing=checked(config, routing))


MELLUM = ModelDefinition(
    architecture="MellumForCausalLM",
    traits=qwen3_traits,
    layers=_layers,
    ropes=_ropes,
    moe=_moe,
    head_dim=128,
    rope_theta=GLOBAL_THETA,
    names=TensorNames(left_out=("mtp.",)),
)
