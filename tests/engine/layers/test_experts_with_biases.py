"""Experts with biases and a clamped gate: every method gives what transformers' experts of gpt-oss give, in whole and in parts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from starling_engine import native
from starling_engine.layers.experts import ExpertNames, Experts, ExpertsMethod, ExpertsShape
from starling_engine.layers.experts_dense import DenseExperts
from starling_engine.layers.experts_packed import NativeExperts
from starling_engine.layers.experts_quantized import QuantizedExperts
from starling_engine.model_config.moe import ClampedSwiglu, ExpertLayout, TanhGelu
from starling_engine.native.group_quantized import FP8, INT8, Format
from starling_engine.topology.shard import Shard, Share
from torch import Tensor
from transformers import DeepseekV4Config, GptOssConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tests.engine.layers.test_experts import routes

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
GATE = ClampedSwiglu(alpha=1.3, limit=0.8)
WIDTH, HIDDEN, EXPERTS = 128, 192, 5
NAMES = ExpertNames(
    "mlp.experts",
    ("gate_proj", "up_proj", "down_proj"),
    (("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",)),
    "alternating columns",
)

needs_native = pytest.mark.skipif(native.load() is None, reason="no native kernels")
METHODS = [
    pytest.param(DenseExperts, FP32, 1e-5, id="dense-fp32"),
    pytest.param(DenseExperts, BF16, 0.03, id="dense-bf16"),
    pytest.param(NativeExperts, BF16, 0.03, id="native", marks=needs_native),
    pytest.param(lambda: QuantizedExperts(INT8, INT8, online=True), BF16, 0.06, id="int8", marks=needs_native),
    pytest.param(lambda: QuantizedExperts(FP8, FP8, online=True), BF16, 0.15, id="fp8", marks=needs_native),
]


def shape_of(intermediate: Share) -> ExpertsShape:
    return ExpertsShape(EXPERTS, EXPERTS, HIDDEN, intermediate, bias=True, gate=GATE)


def reference() -> GptOssExperts:
    """Numbers are fp32 that are exact in bf16; many gates and ups reach the limit."""
    config = GptOssConfig(
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        swiglu_alpha=GATE.alpha,
        swiglu_limit=GATE.limit,
    )
    experts, generator = GptOssExperts(config), torch.Generator().manual_seed(0)
    for name, weight in experts.named_parameters():
        scale = 0.5 if name.endswith("bias") else weight.shape[1] ** -0.5
        weight.data = (torch.randn(weight.shape, generator=generator) * scale).to(BF16).float()
    return experts


def filled(
    method: ExpertsMethod,
    dtype: torch.dtype,
    shape: ExpertsShape,
    source: torch.nn.Module,
    device: torch.device = CPU,
    layout: ExpertLayout = "alternating columns",
) -> Experts:
    layer = Experts(replace(NAMES, layout=layout), shape, method, dtype, device)
    tensors = {f"mlp.experts.{name}": weight.detach() for name, weight in source.named_parameters()}
    for expert in range(shape.num_experts):
        for slot in reversed(layer.reserve(expert).values()):
            assert slot.alias is not None
            (tensor,) = slot.alias.tensors
            assert tensors[tensor].shape == slot.alias.shape
            part = tensors[tensor][slot.alias.index]
            slot.load(part.T if slot.alias.transposed else part)
    return layer


def check(
    source: torch.nn.Module,
    parts: Sequence[Experts],
    tokens: int,
    dtype: torch.dtype,
    tolerance: float,
    device: torch.device = CPU,
) -> None:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids, weights = routes(tokens, 3, EXPERTS)
    given = x.to(device), ids.to(device), weights.to(device)
    out = sum((part.forward(*given).cpu().float() for part in parts), torch.zeros(x.shape))
    with torch.inference_mode():
        expected = source(x.float(), ids, weights)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("make", "dtype", "tolerance"), METHODS)
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_gives_what_the_reference_gives(
    make: Callable[[], ExpertsMethod], dtype: torch.dtype, tolerance: float, tokens: int
) -> None:
    source = reference()
    check(source, [filled(make(), dtype, shape_of(Share.all(WIDTH)), source)], tokens, dtype, tolerance)


def without_offset() -> tuple[DeepseekV4Experts, ExpertsShape]:
    """Ups are not moved by 1."""
    sizes = {"n_routed_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
    source = DeepseekV4Experts(DeepseekV4Config(**sizes, swiglu_limit=GATE.limit))
    for weight in source.parameters():
        numbers = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.shape[2] ** -0.5
        weight.data = numbers.to(BF16).float()
    shape = replace(shape_of(Share.all(WIDTH)), bias=False, gate=ClampedSwiglu(alpha=1.0, limit=GATE.limit, offset=0.0))
    return source, shape


@pytest.mark.parametrize(("make", "dtype", "tolerance"), METHODS)
def test_a_clamped_gate_without_an_offset(make: Callable[[], ExpertsMethod], dtype: torch.dtype, tolerance: float) -> None:
    source, shape = without_offset()
    check(source, [filled(make(), dtype, shape, source, layout="rows")], 9, dtype, tolerance)


def with_gelu(far: float) -> tuple[Gemma4TextExperts, ExpertsShape]:
    """Some gates are `far` times as large as others, so that GELU's cube is large."""
    source = Gemma4TextExperts(Gemma4TextConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=WIDTH))
    for weight in source.parameters():
        numbers = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.shape[2] ** -0.5
        weight.data = numbers.to(BF16).float()
    source.gate_up_proj.data[:, :8] *= far
    return source, replace(shape_of(Share.all(WIDTH)), bias=False, gate=TanhGelu())


@pytest.mark.parametrize(("make", "dtype", "tolerance"), METHODS)
def test_a_gate_of_gelu(make: Callable[[], ExpertsMethod], dtype: torch.dtype, tolerance: float) -> None:
    source, shape = with_gelu(far=32.0)
    check(source, [filled(make(), dtype, shape, source, layout="rows")], 9, dtype, 10 * tolerance)


@pytest.mark.parametrize(("make", "dtype", "tolerance"), METHODS)
def test_what_ranks_give_adds_up(make: Callable[[], ExpertsMethod], dtype: torch.dtype, tolerance: float) -> None:
    """One of them adds the biases of downs."""
    source = reference()
    parts = [filled(make(), dtype, shape_of(Shard(rank, 2).of(WIDTH)), source) for rank in range(2)]
    check(source, parts, 9, dtype, tolerance)


@pytest.mark.parametrize(("make", "dtype", "tolerance"), METHODS)
def test_a_copy_of_the_memory_is_the_same_expert(make: Callable[[], ExpertsMethod], dtype: torch.dtype, tolerance: float) -> None:
    source = reference()
    layer = filled(make(), dtype, shape_of(Share.all(WIDTH)), source)
    other = Experts(NAMES, layer.shape, make(), dtype, CPU)
    for expert in range(EXPERTS):
        kept = layer.method.memory(layer._reserved[expert])
        for to, given in zip(other.reserve_memory(expert), kept, strict=True):
            to.copy_(given.view(-1).view(torch.uint8))
        other.mark_loaded(expert)
    check(source, [other], 9, dtype, tolerance)


def test_the_gate_shows_what_is_not_a_number() -> None:
    """A clamp would hide it."""
    source = reference()
    source.gate_up_proj_bias.data[:] = torch.nan
    for make, dtype in ((DenseExperts, FP32), (NativeExperts, BF16)) if native.load() is not None else ((DenseExperts, FP32),):
        layer = filled(make(), dtype, shape_of(Share.all(WIDTH)), source)
        out: Tensor = layer.forward(torch.ones(2, HIDDEN, dtype=dtype), *routes(2, 3, EXPERTS))
        assert out.isnan().all()


@pytest.mark.parametrize(("make", "dtype", "_close"), METHODS)
def test_a_config_s_word_takes_no_memory(make: Callable[[], ExpertsMethod], dtype: torch.dtype, _close: float) -> None:
    """Biases, and orders of columns, have room once a tensor of their shape has come."""
    width = 1 << 40
    shape = shape_of(Share.all(width))
    layer = Experts(NAMES, shape, make(), dtype, CPU)
    assert layer.reserve(0)[NAMES.weight(0, "up", "bias")].shape == (width,)
    form = Format(4, gathered=width, filled=32, zero=8)
    ordered = Experts(NAMES, shape, QuantizedExperts(form, form, online=False), BF16, CPU)
    assert ordered.reserve(0)[NAMES.weight(0, "down")].shape == (HIDDEN, width)
