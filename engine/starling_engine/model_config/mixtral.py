"""Mixtral: Mistral with experts in every layer, under tensor names of its own."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, one_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts

NAMES = TensorNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert_projections=("w1", "w3", "w2"))


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


MIXTRAL = ModelDefinition(architecture="MixtralForCausalLM", layers=one_window, moe=_moe, names=NAMES, rope_theta=1e6, rms_eps=1e-5)
