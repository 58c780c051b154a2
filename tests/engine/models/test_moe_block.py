"""The whole block, router and shared experts included, against transformers' own of DeepSeek, where every part of it occurs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from starling_engine import native
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import parse_model_config
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing
from starling_engine.model_config.quantization import QuantizationConfig, WeightScheme
from starling_engine.models import mlp
from starling_engine.models.build_context import BuildContext
from starling_engine.models.moe_block import MoeBlock
from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.shard import Share
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from tests.engine.parallel.threads import on_ranks

CPU = torch.device("cpu")
HIDDEN, SIZE, EXPERTS = 32, 24, 16
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": SIZE,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
V2 = DeepseekV2Config(**SIZES, topk_method="group_limited_greedy", routed_scaling_factor=16.0, n_shared_experts=2)
V3 = DeepseekV3Config(**SIZES, routed_scaling_factor=2.5, n_shared_experts=1)
V2_ROUTING = Routing(num_experts=EXPERTS, top_k=4, num_groups=4, top_groups=2, scaling=16.0)
V3_ROUTING = replace(V2_ROUTING, score="sigmoid", bias=True, group_score="best two", renormalize=True, scaling=2.5)
BLOCKS = {
    "deepseek-v2": (
        lambda: DeepseekV2Moe(V2),
        MoeConfig(layers=(0,), intermediate_size=SIZE, routing=V2_ROUTING, shared_size=2 * SIZE),
    ),
    "deepseek-v3": (
        lambda: DeepseekV3MoE(V3),
        MoeConfig(layers=(0,), intermediate_size=SIZE, routing=V3_ROUTING, shared_size=SIZE),
    ),
}


def build_context(moe: MoeConfig, dtype: torch.dtype) -> BuildContext:
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 1,
        "vocab_size": 1,
        "max_position_embeddings": 1,
    }
    config = parse_model_config(Fields(fields, "config.json"), Fields({}, ""))
    return BuildContext(
        config=replace(config, moe=moe),
        names=TensorNames(),
        dtype=dtype,
        device=CPU,
        methods=select_linear_method(dtype, CPU),
        experts=select_experts_method(dtype, CPU),
        backend=TorchPagedAttention(),
        rotations={},
    )


def test_ranks_split_codes_where_kernels_can_multiply_them() -> None:
    """Evenly where that is possible, or where there are no codes, or not for every rank."""
    expected = {
        (2880, 32): [704, 736, 704, 736],
        (2880, 128): [704, 736, 704, 736],
        (2880, 16): [720] * 4,
        (2880, None): [720] * 4,
        (2872, 32): [718] * 4,
        (768, 32): [192] * 4,
        (64, 32): [16] * 4,
    }

    def shares(ranks: Communicator) -> list[Share]:
        found = []
        for width, group in expected:
            moe = MoeConfig(layers=(0,), intermediate_size=width, routing=V2_ROUTING)
            build = replace(build_context(moe, torch.bfloat16), tensor=ranks)
            quantization = None if group is None else QuantizationConfig("mxfp4", WeightScheme(4, group))
            found.append(replace(build, config=replace(build.config, quantization=quantization)).expert_width(moe))
        return found

    for sizes, split in zip(expected.values(), zip(*on_ranks(4, "gloo", shares), strict=True), strict=True):
        assert [share.size for share in split] == sizes
        assert [share.start for share in split] == [sum(sizes[:at]) for at in range(4)]


def pair(name: str, dtype: torch.dtype) -> tuple[MoeBlock, nn.Module]:
    """Returns ours, and the reference in fp32 with the same weights, which are exact in bf16."""
    make, moe = BLOCKS[name]
    reference = make()
    torch.manual_seed(0)
    for tensor_name, tensor in reference.state_dict().items():
        std = 0.2 if "bias" in tensor_name else 1.5 * tensor.shape[-1] ** -0.5
        tensor.copy_((torch.randn(tensor.shape) * std).bfloat16())
    tensors = {f"layer.mlp.{key}": tensor for key, tensor in reference.state_dict().items()}
    block = MoeBlock(build_context(moe, dtype), moe, 0, "layer")
    slots = block.weight_slots()
    for key, slot in slots.items():
        slot.load(tensors[key] if key in tensors else tensors[slot.alias.tensors[0]][slot.alias.index])
    assert "layer.mlp.gate.weight" in slots and "layer.mlp.shared_experts.down_proj.weight" in slots
    return block, reference


@pytest.mark.parametrize("has_native", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_gives_what_the_reference_gives(
    name: str, dtype: torch.dtype, tolerance: float, has_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that each token goes to the very same experts in bf16, too: the router's logits are exact."""
    if not has_native:
        monkeypatch.setattr(native, "load", lambda: None)
    block, reference = pair(name, dtype)
    x = torch.randn(1000, HIDDEN).to(dtype)
    with torch.inference_mode():
        expected = reference(x.float()[None])[0]
        out = block.forward(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance * expected.abs().max().item(), rtol=0)


def test_shared_experts_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    block, _ = pair("deepseek-v2", torch.float32)
    x = torch.randn(50, HIDDEN)
    whole = block.forward(x)
    monkeypatch.setattr(mlp, "CACHED_ROWS", 16)
    torch.testing.assert_close(block.forward(x), whole, atol=1e-5, rtol=1e-5)
