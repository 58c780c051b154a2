"""MiMo 7B: Qwen2, with layers for drafts that are not loaded."""

from dataclasses import replace

from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.qwen2 import QWEN2

MIMO = replace(QWEN2, architecture="MiMoForCausalLM", names=TensorNames(left_out=("model.mtp_layers.",)))
