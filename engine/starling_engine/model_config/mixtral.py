"""Mixtral: Mistral with experts in every layer, under tensor names of its own."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, Traits
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts

NAMES = TensorNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert_projections=("w1", "w3", "w2"))


def _windows(config: Fields, num_layers: int) -> tuple[int, ...]:
    return (config.integer("sliding_window") if config.has("sliding_window") else 0,) * num_layers


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    routing = Routing(
        num_experts=read_num_experts(config, "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=True,
    )
    return MoeConfig(
        layers=tuple(range(num_layers)),
        intermediate_size=config.integer("intermediate_size"),
        routing=checked(config, routing),
    )


def _traits(_config: Fields) -> Traits:
    return Traits()


MIXTRAL = ModelDefinition(
    architecture="MixtralForCausalLM", traits=_traits, windows=_windows, moe=_moe, names=NAMES, rope_theta=1e6, rms_eps=1e-5
)
