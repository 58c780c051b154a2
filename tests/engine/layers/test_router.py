"""Each token goes to the experts, with the weights, that transformers' own routers give it."""

from typing import Any

import pytest
import torch
from starling_engine import native
from starling_engine.layers.router import Route, route
from starling_engine.model_config.moe import Routing
from starling_engine.native import routing_ops
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

TOKENS, HIDDEN = 200, 32


def qwen3(**fields: Any) -> nn.Module:
    return Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=HIDDEN, **fields))


def mixtral(**fields: Any) -> nn.Module:
    return MixtralTopKRouter(MixtralConfig(hidden_size=HIDDEN, **fields))


def deepseek_v2(**fields: Any) -> nn.Module:
    return DeepseekV2TopkRouter(DeepseekV2Config(hidden_size=HIDDEN, **fields))


def deepseek_v3(**fields: Any) -> nn.Module:
    return DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=HIDDEN, **fields))


CASES = {
    "qwen3": (qwen3(num_experts=8, num_experts_per_tok=3, norm_topk_prob=False), Routing(num_experts=8, top_k=3)),
    "qwen3-renormalized": (
        qwen3(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
        Routing(num_experts=128, top_k=8, renormalize=True),
    ),
    "mixtral": (mixtral(num_local_experts=8, num_experts_per_tok=2), Routing(num_experts=8, top_k=2, renormalize=True)),
    "mixtral-one": (mixtral(num_local_experts=4, num_experts_per_tok=1), Routing(num_experts=4, top_k=1, renormalize=True)),
    "deepseek-v2-lite": (
        deepseek_v2(n_routed_experts=64, num_experts_per_tok=6, topk_method="greedy", routed_scaling_factor=1.0),
        Routing(num_experts=64, top_k=6),
    ),
    "deepseek-v2": (
        deepseek_v2(
            n_routed_experts=32,
            num_experts_per_tok=6,
            topk_method="group_limited_greedy",
            n_group=8,
            topk_group=3,
            routed_scaling_factor=16.0,
        ),
        Routing(num_experts=32, top_k=6, num_groups=8, top_groups=3, scaling=16.0),
    ),
    "deepseek-v2-one-group": (
        deepseek_v2(n_routed_experts=16, num_experts_per_tok=4, topk_method="group_limited_greedy", n_group=4, topk_group=1),
        Routing(num_experts=16, top_k=4, num_groups=4, top_groups=1),
    ),
    "deepseek-v3": (
        deepseek_v3(
            n_routed_experts=32, num_experts_per_tok=8, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5
        ),
        Routing(
            num_experts=32,
            top_k=8,
            score="sigmoid",
            bias=True,
            num_groups=8,
            top_groups=4,
            group_score="best two",
            renormalize=True,
            scaling=2.5,
        ),
    ),
    "deepseek-v3-without-groups": (
        deepseek_v3(
            n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0
        ),
        Routing(num_experts=16, top_k=4, score="sigmoid", bias=True, group_score="best two"),
    ),
}


def dense(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, num_experts], zero for the experts that a token does not go to: the order of its experts does not matter."""
    return torch.zeros(len(ids), num_experts, dtype=weights.dtype).scatter_(-1, ids, weights)


ROUTES = [route, pytest.param(routing_ops.route, marks=pytest.mark.skipif(native.load() is None, reason="no native kernels here"))]
every_route = pytest.mark.parametrize("route", ROUTES, ids=["torch", "native"])


@every_route
@pytest.mark.parametrize("name", CASES)
def test_the_experts_and_weights_of_the_reference(name: str, route: Route) -> None:
    reference, routing = CASES[name]
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(reference.weight, std=2 * HIDDEN**-0.5, generator=generator)
    bias = None
    if routing.bias:
        bias = torch.randn(routing.num_experts, generator=generator)
        reference.e_score_correction_bias.copy_(bias)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    with torch.inference_mode():
        logits, expected_weights, expected_ids = reference(x)
        weights, ids = route(logits, routing, bias)
    assert ids.shape == weights.shape == (TOKENS, routing.top_k) and weights.dtype == torch.float32
    assert torch.equal(ids.sort(-1).values, expected_ids.sort(-1).values)
    expected = dense(expected_weights, expected_ids, routing.num_experts)
    torch.testing.assert_close(dense(weights, ids, routing.num_experts), expected, atol=1e-6, rtol=1e-6)


@every_route
def test_the_bias_chooses_and_does_not_weigh(route: Route) -> None:
    routing = Routing(num_experts=4, top_k=2, score="sigmoid", bias=True)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, ids = route(logits, routing, torch.tensor([0.0, -5.0, 0.0, 5.0]))
    assert sorted(ids[0].tolist()) == [0, 3]
    torch.testing.assert_close(weights, logits.sigmoid().gather(-1, ids), atol=1e-7, rtol=1e-6)


@pytest.mark.skipif(native.load() is None, reason="no native kernels here")
@pytest.mark.parametrize("routing", [CASES["qwen3-renormalized"][1], CASES["deepseek-v3"][1]], ids=["softmax", "groups"])
def test_what_is_not_a_number_shows_in_its_token_alone(routing: Routing) -> None:
    """Experts are distinct all the same: kernels add each once."""
    logits, bias = torch.randn(3, routing.num_experts), torch.zeros(routing.num_experts) if routing.bias else None
    expected = routing_ops.route(logits, routing, bias)
    logits[1] = float("nan")
    weights, ids = routing_ops.route(logits, routing, bias)
    assert weights[1].isnan().all() and ids[1].unique().numel() == routing.top_k
    assert torch.equal(weights[[0, 2]], expected[0][[0, 2]]) and torch.equal(ids[[0, 2]], expected[1][[0, 2]])
    padded = routing_ops.route(logits, routing, bias, torch.tensor([5, -1, 7]))[1]
    assert padded.tolist() == [ids[0].tolist(), [-1] * routing.top_k, ids[2].tolist()]


@every_route
def test_affinities_of_zero_give_no_nan(route: Route) -> None:
    routing = Routing(num_experts=4, top_k=2, score="sigmoid", renormalize=True)
    weights, _ = route(torch.full((1, 4), -200.0), routing)
    assert torch.equal(weights, torch.zeros(1, 2))


def test_no_tokens() -> None:
    weights, ids = route(torch.empty(0, 8), Routing(num_experts=8, top_k=2, num_groups=4, top_groups=2, renormalize=True))
    assert weights.shape == ids.shape == (0, 2)
