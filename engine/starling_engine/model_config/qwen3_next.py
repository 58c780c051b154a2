"""Qwen3-Next: three of four layers are Gated DeltaNets, the others attend and have a gate; experts, and a shared one."""

from typing import Literal

from starling_engine.model_config.definition import ModelDefinition, TensorNames, partial_rope
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import DeltaNames, every_nth_attends, read_gated_delta
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.qwen2_moe import read_shared_moe
from starling_engine.model_config.traits import Traits

DRAFTS = "mtp."
"""Beginning of the names of layers for drafts."""
NAMES = TensorNames(
    shared_experts="mlp.shared_expert",
    delta=DeltaNames(qkvz="linear_attn.in_proj_qkvz", ba="linear_attn.in_proj_ba"),
    left_out=(DRAFTS,),
)


def hybrid_traits(config: Fields) -> Traits:
    """Reads what the layers of Qwen3-Next and 3.5 have in common."""
    bias = config.boolean("attention_bias", False)
    gate: Literal["element"] | None = "element" if config.boolean("attn_output_gate", True) else None
    return Traits(qkv_bias=bias, o_bias=bias, attention_gate=gate, qk_norm="head", norm="one plus weight")


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    return None if config.get("num_experts") == 0 else read_shared_moe(config, num_layers, renormalize=True)


QWEN3_NEXT = ModelDefinition(
    architecture="Qwen3NextForCausalLM",
    traits=hybrid_traits,
    layers=every_nth_attends,
    ropes=partial_rope(0.25),
    gated_delta=read_gated_delta,
    moe=_moe,
    head_dim=256,
    names=NAMES,
)
