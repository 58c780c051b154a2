"""The routing kernel chooses as the torch code does, which is held to transformers' routers by its own tests."""

import pytest
import torch
from starling_engine.kernels import routing as kernel
from starling_engine.layers.router import route
from starling_engine.model_config.moe import Routing

from tests.engine.kernels import moe_launches
from tests.engine.kernels.compiled import compiled
from tests.engine.layers.test_router import dense

V3 = Routing(
    num_experts=256,
    top_k=8,
    score="sigmoid",
    bias=True,
    num_groups=8,
    top_groups=4,
    group_score="best two",
    renormalize=True,
    scaling=2.5,
)
CASES = {
    "one of two": Routing(num_experts=2, top_k=1),
    "mixtral": Routing(num_experts=8, top_k=2, renormalize=True),
    "qwen3": Routing(num_experts=128, top_k=8, renormalize=True),
    "deepseek-v2, groups of 20": Routing(num_experts=160, top_k=6, num_groups=8, top_groups=3, scaling=16.0),
    "deepseek-v3": V3,
    "sigmoid without groups": Routing(num_experts=12, top_k=5, score="sigmoid", bias=True, group_score="best two"),
    "three groups, all chosen from": Routing(num_experts=9, top_k=9, num_groups=3, top_groups=3),
}


@pytest.mark.parametrize("name", CASES)
def test_chooses_as_the_reference(name: str, device: torch.device) -> None:
    routing, generator = CASES[name], torch.Generator().manual_seed(0)
    wide = torch.randn(11, routing.num_experts + 3, generator=generator).to(device)
    logits = wide[:, : routing.num_experts] * 2  # rows that lie apart
    bias = torch.randn(routing.num_experts, generator=generator).to(device) if routing.bias else None
    weights, ids = kernel.route(logits, routing, bias)
    slots = torch.arange(-2, 9, device=device).roll(3)
    for function in (kernel.route, route):
        of_some = function(logits, routing, bias, slots)[1]
        assert bool((of_some[3:5] == -1).all()) and int((of_some < 0).sum()) == 2 * routing.top_k, (
            "what fills a step up goes nowhere"
        )
    assert torch.equal(kernel.route(logits, routing, bias, slots)[1][5:], ids[5:])
    expected_weights, expected_ids = route(logits, routing, bias)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(ids.sort(-1).values, expected_ids.sort(-1).values)
    expected = dense(expected_weights.cpu(), expected_ids.cpu(), routing.num_experts)
    torch.testing.assert_close(dense(weights.cpu(), ids.cpu(), routing.num_experts), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_affinities_of_zero_give_no_nan(device: torch.device) -> None:
    routing = Routing(num_experts=4, top_k=2, score="sigmoid", renormalize=True)
    weights, _ = kernel.route(torch.full((1, 4), -200.0, device=device), routing)
    assert torch.equal(weights.cpu(), torch.zeros(1, 2))


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_a_token_of_nan_goes_to_experts_that_there_are(device: torch.device) -> None:
    """Checks that padding of any content reads nothing outside of the weights, and changes no other token."""
    logits = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).to(device)
    bias = torch.zeros(256, device=device)
    expected = kernel.route(logits, V3, bias)[1][1]
    logits[0] = float("nan")
    ids = kernel.route(logits, V3, bias)[1]
    assert len(set(ids[0].tolist())) == 8 and ids[0].min() >= 0 and ids[0].max() < 256
    assert torch.equal(ids[1], expected)


def test_no_tokens(device: torch.device) -> None:
    weights, ids = kernel.route(torch.empty(0, 8, device=device), Routing(num_experts=8, top_k=2))
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_compiles_without_spills(name: str) -> None:
    (found,) = compiled(moe_launches.route, CASES[name])
    assert found.stack == 0 and found.shared < 4096
