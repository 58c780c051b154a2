"""Qwen 3.5 and 3.6 as text models, dense and with experts: Qwen3-Next's layers, with a matrix for each part of a Gated DeltaNet."""

from dataclasses import replace

from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, no_experts
from starling_engine.model_config.qwen2_moe import read_shared_moe
from starling_engine.model_config.qwen3_next import DRAFTS, QWEN3_NEXT

NAMES = TensorNames(shared_experts="mlp.shared_expert", left_out=(DRAFTS, "model.visual.", "visual."))


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    """Reads experts, which all layers have, and whose affinities always sum to 1."""
    every = Fields({**config.values, "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True}, config.source)
    moe = read_shared_moe(every, num_layers, renormalize=True)
    assert moe is not None, "every layer has experts"
    return moe


QWEN3_5 = replace(QWEN3_NEXT, architecture="Qwen3_5ForCausalLM", moe=no_experts, nested="text_config", names=NAMES)
QWEN3_5_MOE = replace(QWEN3_5, architecture="Qwen3_5MoeForCausalLM", moe=_moe, mlp_field="moe_intermediate_size")
