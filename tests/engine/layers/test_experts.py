"""Every experts method gives what transformers' experts give, however the tokens are spread over them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from starling_engine import native
from starling_engine.errors import ConfigError
from starling_engine.layers.experts import ExpertNames, Experts, ExpertsMethod, ExpertsShape, group_by_slot
from starling_engine.layers.experts_dense import DenseExperts
from starling_engine.layers.experts_packed import NativeExperts
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.native import routing_ops
from starling_engine.topology.shard import Shard, Share
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.engine.instruction_sets import multiplies_by_tiles

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
SHAPE = ExpertsShape(num_experts=7, num_slots=7, hidden_size=50, intermediate=Share.all(24))
NAMES = ExpertNames(
    "mlp.experts", ("gate_proj", "up_proj", "down_proj"), (("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",))
)

needs_native = pytest.mark.skipif(native.load() is None, reason="no native kernels")
METHODS = [
    pytest.param(DenseExperts, FP32, id="dense-fp32"),
    pytest.param(DenseExperts, BF16, id="dense-bf16"),
    pytest.param(NativeExperts, BF16, id="native", marks=needs_native),
]


def reference(shape: ExpertsShape) -> Qwen3MoeExperts:
    """Transformers' experts in fp32, with weights that are exact in bf16."""
    config = Qwen3MoeConfig(
        num_experts=shape.num_experts, hidden_size=shape.hidden_size, moe_intermediate_size=shape.intermediate_size
    )
    experts = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.data = (torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5).to(BF16).float()
    return experts


def filled(
    method: ExpertsMethod, dtype: torch.dtype, shape: ExpertsShape, source: Qwen3MoeExperts, experts: Sequence[int] | None = None
) -> Experts:
    """Loads all experts, or those given."""
    layer = Experts(NAMES, shape, method, dtype, CPU)
    for expert in range(shape.num_experts) if experts is None else experts:
        load(layer, source, expert)
    return layer


def load(layer: Experts, source: Qwen3MoeExperts, expert: int, parts: int = 3) -> None:
    # The last part first: the order must not matter.
    for name, slot in [*reversed(layer.reserve(expert).items())][:parts]:
        gate, up = source.gate_up_proj[expert].chunk(2)
        whole = {"gate_proj": gate, "up_proj": up, "down_proj": source.down_proj[expert]}[name.split(".")[3]].detach()
        slot.load(whole[slot.part])


def routes(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) of tokens that prefer low experts, so that some get many tokens and some none."""
    generator = torch.Generator().manual_seed(tokens)
    likely = 2.0 ** -torch.arange(experts, dtype=FP32).expand(tokens, experts)
    if not tokens:
        return torch.empty(0, top_k, dtype=torch.int64), torch.empty(0, top_k)
    return torch.multinomial(likely, top_k, generator=generator), torch.rand(tokens, top_k, generator=generator)


@pytest.mark.parametrize(("make", "dtype"), METHODS)
@pytest.mark.parametrize("top_k", [1, 3, 7])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 130, 700])
def test_gives_what_the_reference_gives(make: Callable[[], ExpertsMethod], dtype: torch.dtype, top_k: int, tokens: int) -> None:
    source = reference(SHAPE)
    layer = filled(make(), dtype, SHAPE, source)
    x = torch.randn(tokens, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids, weights = routes(tokens, top_k, SHAPE.num_experts)
    out = layer.forward(x, ids, weights)
    assert out.dtype == dtype and out.shape == x.shape
    with torch.inference_mode():
        expected = source(x.float(), ids, weights)
    tolerance = 1e-5 if dtype == FP32 else 0.03
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("make", "dtype"), METHODS)
def test_a_token_does_not_depend_on_the_others(make: Callable[[], ExpertsMethod], dtype: torch.dtype) -> None:
    layer = filled(make(), dtype, SHAPE, reference(SHAPE))
    x = torch.randn(40, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids, weights = routes(40, 3, SHAPE.num_experts)
    alone = torch.cat([layer.forward(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(40)])
    torch.testing.assert_close(layer.forward(x, ids, weights), alone, atol=1e-6 if dtype == FP32 else 0.03, rtol=0.01)


@needs_native
def test_without_tiles_the_native_method_is_equal_bit_for_bit_in_any_batch() -> None:
    if multiplies_by_tiles():
        pytest.skip("tiles add up in another order than registers")
    shape = ExpertsShape(5, 5, 96, Share.all(64))
    layer = filled(NativeExperts(), BF16, shape, reference(shape))
    x = torch.randn(60, 96, generator=torch.Generator().manual_seed(1)).to(BF16)
    ids, weights = routes(60, 2, 5)
    alone = torch.cat([layer.forward(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(60)])
    assert torch.equal(layer.forward(x, ids, weights), alone)


def test_names_its_tensors_as_checkpoints_do() -> None:
    names = ExpertNames("l.block_sparse_moe.experts", ("w1", "w3", "w2"), (("l.gate_up_proj", "l.older"), ("l.down_proj",)))
    layer = Experts(names, ExpertsShape(2, 2, 6, Share.all(4)), DenseExperts(), FP32, CPU)
    slots = {**layer.reserve(0), **layer.reserve(1)}
    assert {name.removeprefix("l.block_sparse_moe.experts."): slot.shape for name, slot in slots.items()} == {
        "0.w1.weight": (4, 6),
        "0.w3.weight": (4, 6),
        "0.w2.weight": (6, 4),
        "1.w1.weight": (4, 6),
        "1.w3.weight": (4, 6),
        "1.w2.weight": (6, 4),
    }
    up = slots["l.block_sparse_moe.experts.1.w3.weight"].alias
    assert up is not None and (up.tensors, up.shape) == (("l.gate_up_proj", "l.older"), (2, 8, 6))
    assert up.index == (1, slice(4, 8))


@needs_native
def test_packing_holds_no_more_than_one_expert_besides() -> None:
    method = NativeExperts()
    layer = Experts(NAMES, ExpertsShape(3, 3, 32, Share.all(16)), method, BF16, CPU)
    for slot in [slot for expert in range(3) for slot in layer.reserve(expert).values()]:
        slot.load(torch.zeros(slot.shape))
        assert len(method._staged) <= 1
    assert not method._staged


def test_tokens_are_sorted_by_slot_and_stay_in_order() -> None:
    groups = group_by_slot(torch.tensor([[3, 0], [0, 2], [3, 2]]), 5)
    assert groups.starts.tolist() == [0, 2, 2, 4, 6, 6]
    assert groups.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert groups.order.tolist() == [1, 2, 3, 5, 0, 4]


@needs_native
@pytest.mark.parametrize(("tokens", "top_k", "slots"), [(0, 2, 4), (1, 1, 1), (3, 2, 2), (70, 8, 40)])
def test_the_native_kernel_sorts_alike(tokens: int, top_k: int, slots: int) -> None:
    """Pairs of slot `slots` are elsewhere, and left out."""
    chosen, weights = torch.randint(0, slots + 1, (tokens, top_k)), torch.rand(tokens, top_k)
    expected = group_by_slot(chosen, slots)
    starts, found, by_pair = routing_ops.group_by_slot(chosen, weights, slots)
    here = int(starts[-1])
    assert torch.equal(starts, expected.starts) and torch.equal(found[:here], expected.tokens)
    assert torch.equal(by_pair[:here], weights.flatten()[expected.order])
    table = torch.randperm(9)
    assert torch.equal(routing_ops.look_up(table, torch.tensor([[3, -1], [0, 8]])), table[torch.tensor([[3, -1], [0, 8]])])


@pytest.mark.parametrize(
    ("dtype", "has_native", "shape", "method", "reason"),
    [
        (FP32, True, SHAPE, "dense", "only bfloat16"),
        (torch.float16, True, SHAPE, "dense", "only bfloat16"),
        (BF16, True, SHAPE, "native", "native kernels"),
        (BF16, False, SHAPE, "dense", "no native kernels"),
        (BF16, True, ExpertsShape(4, 4, 64, Share.all(28)), "dense", "64 and 28"),
        (BF16, True, ExpertsShape(4, 4, 63, Share.all(32)), "dense", "63 and 32"),
        (BF16, True, ExpertsShape(4, 4, 64, Share.all(32), gated=False), "native", "native kernels"),
    ],
)
def test_the_selector_says_what_it_takes_and_why(
    dtype: torch.dtype,
    has_native: bool,
    shape: ExpertsShape,
    method: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(native, "load", lambda: object() if has_native else None)
    with caplog.at_level("INFO", "starling.layers"):
        select = select_experts_method(dtype, CPU)
        assert [select(shape, NAMES).name, select(shape, NAMES).name] == [method, method]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"experts: {method} (") and reason in caplog.messages[0]


@needs_native
@pytest.mark.parametrize("tokens", [0, 1, 9, 130])
def test_experts_without_a_gate_give_the_same_by_kernels(tokens: int) -> None:
    shape = replace(SHAPE, gated=False)
    source, (ids, weights) = reference(shape), routes(tokens, 3, shape.num_experts)
    x = torch.randn(tokens, shape.hidden_size, generator=torch.Generator().manual_seed(1)).to(BF16)
    exact = filled(DenseExperts(), FP32, shape, source).forward(x.float(), ids, weights)
    found = filled(NativeExperts(), BF16, shape, source).forward(x, ids, weights)
    torch.testing.assert_close(found.float(), exact, atol=0.03, rtol=0.03)


def test_experts_without_a_gate_are_not_quantized() -> None:
    select = select_experts_method(BF16, CPU, "int8")
    with pytest.raises(ConfigError, match="quantization: int8 is not possible for experts without a gate; leave it out"):
        select(ExpertsShape(4, 4, 64, Share.all(64), gated=False), NAMES)


def test_pairs_with_experts_of_other_ranks_are_left_out() -> None:
    groups = group_by_slot(torch.tensor([[1, 2], [2, 0], [1, 0], [2, 2]]), 2)
    assert groups.starts.tolist() == [0, 2, 4]
    assert groups.tokens.tolist() == [1, 2, 0, 2]
    assert groups.order.tolist() == [3, 5, 0, 4]


@pytest.mark.parametrize(("make", "dtype"), METHODS)
@pytest.mark.parametrize("split", ["experts", "intermediate"])
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_what_ranks_give_adds_up(make: Callable[[], ExpertsMethod], dtype: torch.dtype, split: str, tokens: int) -> None:
    whole = ExpertsShape(6, 6, 48, Share.all(32))
    source = reference(whole)
    if split == "experts":
        parts = [filled(make(), dtype, replace(whole, num_slots=4), source, experts) for experts in ([5, 0], [3, 1, 4, 2])]
    else:
        shapes = [replace(whole, intermediate=Shard(rank, 2).of(32)) for rank in range(2)]
        parts = [filled(make(), dtype, shape, source) for shape in shapes]
    x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids, weights = routes(tokens, 2, 6)
    check_sum(source, parts, x, ids, weights)


def check_sum(source: Qwen3MoeExperts, parts: Sequence[Experts], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    out = sum(part.forward(x, ids, weights).float() for part in parts)
    with torch.inference_mode():
        expected = source(x.float(), ids, weights)
    tolerance = 1e-5 if x.dtype == FP32 else 0.03
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("make", "dtype"), METHODS)
def test_experts_come_and_go(make: Callable[[], ExpertsMethod], dtype: torch.dtype) -> None:
    """Checks that an expert which was dropped half loaded leaves nothing in its slot."""
    shape = ExpertsShape(6, 3, 48, Share.all(32))
    source = reference(replace(shape, num_slots=6))
    layer = filled(make(), dtype, shape, source, [0, 1])
    for parts in (1, 2):
        load(layer, source, 5, parts)
        assert layer.reserved == {0, 1, 5} and not layer.has(5)
        layer.drop(5)
    load(layer, source, 4)
    with pytest.raises(ConfigError, match="no free slot for expert 2: all 3"):
        layer.reserve(2)
    layer.drop(1)
    load(layer, source, 2)
    assert [expert for expert in range(6) if layer.has(expert)] == [0, 2, 4]
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids, weights = torch.tensor([[0, 2, 4]]).expand(9, 3), torch.rand(9, 3)
    check_sum(source, [layer], x, ids, weights)
    # Those that are elsewhere add nothing.
    both = torch.cat([ids, torch.tensor([[1, 3, -1]]).expand(9, 3)], 1)
    assert torch.equal(layer.forward(x, both, weights.repeat(1, 2)), layer.forward(x, ids, weights))


@pytest.mark.parametrize(("make", "dtype"), METHODS)
def test_without_experts_of_its_own_a_rank_adds_nothing(make: Callable[[], ExpertsMethod], dtype: torch.dtype) -> None:
    layer = Experts(NAMES, ExpertsShape(6, 3, 48, Share.all(32)), make(), dtype, CPU)
    out = layer.forward(torch.ones(2, 48, dtype=dtype), torch.tensor([[0, 5], [3, 1]]), torch.ones(2, 2))
    assert torch.equal(out, torch.zeros(2, 48, dtype=dtype))
