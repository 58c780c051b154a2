"""Rotary tables against transformers' own functions, to the end of long contexts."""

from typing import Any

import pytest
import torch
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.rope import read_rope
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HEAD_DIM = 64
LENGTH = 100_000
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {**LLAMA3, "rope_theta": 5e5},
        {**LLAMA3, "factor": 32.0, "rope_theta": 1e4},
        {**YARN, "rope_theta": 1e4},
        {**YARN, "rope_theta": 1e6, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "rope_theta": 1e4, "attention_factor": 0.5},
        {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7},
        {**YARN, "rope_theta": 1e4, "truncate": False},
        {**YARN, "rope_theta": 1e4, "factor": 1.0},
    ],
    ids=str,
)
def test_tables_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"max_position_embeddings": 4096, "rope_parameters": parameters}
    positions = torch.tensor([0, 1, 2, 100, 1023, 4095, LENGTH - 1])
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=HEAD_DIM, **fields))
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = build_cos_sin(read_rope(Fields(fields, "config.json")), HEAD_DIM, LENGTH, torch.device("cpu"))
    assert table.shape == (LENGTH, HEAD_DIM) and table.dtype == torch.float32
    half = HEAD_DIM // 2
    torch.testing.assert_close(table[positions, :half], cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[positions, half:], sin[0, :, :half], atol=1e-6, rtol=0)


def test_ntk_scaling_is_that_of_gtes_authors() -> None:
    """In transformers' GTE it has another form: the base is multiplied, and the scaling is linear."""
    fields: dict[str, Any] = {"max_position_embeddings": 8192, "rope_theta": 2e4, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    linear = {"rope_type": "linear", "factor": 8.0 ** (2 / HEAD_DIM), "rope_theta": 16e4}
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=8192, rope_parameters=linear))
    cos, _ = theirs(torch.zeros(1), torch.arange(8192)[None])
    table = build_cos_sin(read_rope(Fields(fields, "config.json")), HEAD_DIM, 8192, torch.device("cpu"))
    torch.testing.assert_close(table[:, : HEAD_DIM // 2], cos[0, :, : HEAD_DIM // 2], atol=2e-3, rtol=0)


def test_a_factor_of_attention_may_be_relative_to_yarns_own() -> None:
    """Reads DeepSeek-R1-0528-Qwen3-8B's scaling, whose `attn_factor` is 1 / (0.1 ln 4 + 1): nothing is left to scale."""
    fields: dict[str, Any] = {"max_position_embeddings": 131072, "rope_scaling": {**YARN, "attn_factor": 0.8782488562869419}}
    plain = {**YARN, "rope_theta": 1e4, "attention_factor": 1.0}
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=131072, rope_parameters=plain))
    cos, _ = theirs(torch.zeros(1), torch.arange(LENGTH)[None])
    table = build_cos_sin(read_rope(Fields(fields, "config.json")), HEAD_DIM, LENGTH, torch.device("cpu"))
    torch.testing.assert_close(table[:, : HEAD_DIM // 2], cos[0, :, : HEAD_DIM // 2], atol=1e-6, rtol=0)
