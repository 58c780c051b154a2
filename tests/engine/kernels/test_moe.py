"""The experts' kernels give what transformers' experts give, however the tokens are spread over them."""

from collections.abc import Callable

import pytest
import torch
from starling_engine.kernels import grouped, grouping
from starling_engine.kernels.grouped import FEW_ROWS, FP32_TILES, MANY_ROWS, SOME_ROWS, ExpertTiles
from starling_engine.layers.experts import Experts, ExpertsShape, group_by_slot
from starling_engine.layers.experts_triton import TritonExperts, TritonQuantizedExperts
from starling_engine.native.group_quantized import INT8
from starling_engine.topology.shard import Shard, Share

from tests.engine.kernels import moe_launches
from tests.engine.kernels.compiled import IN_FLIGHT, MAX_SHARED, compiled
from tests.engine.kernels.guarded import Watch
from tests.engine.layers import test_experts_with_biases as with_biases
from tests.engine.layers.test_experts import NAMES, load, reference, routes

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 1e-5, FP16: 0.005, BF16: 0.03}


@pytest.mark.parametrize(
    ("tokens", "top_k", "slots", "block"), [(2, 1, 1, 16), (9, 3, 7, 16), (70, 8, 40, 64), (300, 5, 5, 128), (64, 8, 8, 16)]
)
@pytest.mark.parametrize("here", [1.0, 0.5, 0.0])
def test_blocks_are_the_sorted_pairs(tokens: int, top_k: int, slots: int, block: int, here: float, device: torch.device) -> None:
    """Sorts up to three chunks. Pairs of experts that the rank lacks are left out."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, slots, generator=generator).argsort(-1)[:, :top_k].contiguous()
    chosen[torch.rand(tokens, top_k, generator=generator) >= here] = slots
    expected = group_by_slot(chosen, slots)
    found = grouping.sort_into_blocks(chosen.to(device), slots, block)
    pairs = len(expected.order)
    assert torch.equal(found.order[:pairs].cpu().long(), expected.order)
    used, want = int(found.used), []
    for slot, (start, end) in enumerate(zip(expected.starts.tolist(), expected.starts[1:].tolist(), strict=False)):
        want += [[slot, first, min(first + block, end)] for first in range(start, end, block)]
    assert found.bounds[:, :used].t().tolist() == want
    assert used <= found.most_blocks


def test_the_most_blocks_are_enough_and_can_be_needed() -> None:
    assert grouping.most_blocks(pairs=10, num_slots=3, block=4) == 4  # 1 + 1 + 8
    assert grouping.most_blocks(pairs=3, num_slots=128, block=16) == 3
    assert grouping.most_blocks(pairs=4096, num_slots=1, block=128) == 32


def filled(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> Experts:
    layer, source = Experts(NAMES, shape, TritonExperts(), dtype, device), reference(shape)
    for expert in range(shape.num_slots):
        load(layer, source, expert)
    return layer


def inputs(shape: ExpertsShape, tokens: int, top_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, 2 * shape.hidden_size, generator=torch.Generator().manual_seed(1))[:, : shape.hidden_size]
    return x.to(dtype), *routes(tokens, top_k, shape.num_experts)


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "intermediate", "dtype", "tiles"),
    [
        (1, 3, 50, 24, FP32, FP32_TILES),
        (9, 3, 128, 64, FP32, FP32_TILES),
        (1, 7, 256, 136, BF16, FEW_ROWS),
        (40, 2, 50, 24, BF16, FEW_ROWS),
        (90, 3, 128, 72, FP16, SOME_ROWS),
        (150, 2, 136, 128, BF16, MANY_ROWS),
    ],
    ids=str,
)
def test_gives_what_the_reference_gives(
    tokens: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype, tiles: ExpertTiles, device: torch.device
) -> None:
    """Slots 4 and up are elsewhere: what they would add is missing. Rows of x lie apart."""
    shape = ExpertsShape(7, 7, hidden, Share.all(intermediate))
    source, method = reference(shape), filled(shape, dtype, device).method
    assert isinstance(method, TritonExperts)
    x, ids, weights = inputs(shape, tokens, top_k, dtype)
    here = ids < 4
    given = (x.to(device), ids.where(here, 7).to(device), weights.to(device), method.gate_ups, method.downs)
    out = grouped.experts(*given, tiles)
    assert out.dtype == dtype
    with torch.inference_mode():
        expected = source(x.float(), ids, weights * here)
    torch.testing.assert_close(out.cpu().float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(grouped.experts(*given, tiles), out)


@pytest.mark.parametrize(("tokens", "dtype", "tolerance"), [(1, BF16, 0.03), (9, FP32, 1e-5)])
def test_biases_and_a_clamped_gate(tokens: int, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    """Ranks have a part of each expert, and one of them adds the biases of downs."""
    source = with_biases.reference()
    shapes = [with_biases.shape_of(Shard(rank, 2).of(with_biases.WIDTH)) for rank in range(2)]
    parts = [with_biases.filled(TritonExperts(), dtype, shape, source, device) for shape in shapes]
    with_biases.check(source, parts, tokens, dtype, tolerance, device)


def test_a_clamped_gate_without_an_offset(device: torch.device) -> None:
    source, shape = with_biases.without_offset()
    layer = with_biases.filled(TritonExperts(), FP32, shape, source, device, layout="rows")
    with_biases.check(source, [layer], 3, FP32, 1e-5, device)


def test_a_gate_of_gelu(device: torch.device) -> None:
    source, shape = with_biases.with_gelu(far=2.0)
    layer = with_biases.filled(TritonExperts(), FP32, shape, source, device, layout="rows")
    with_biases.check(source, [layer], 3, FP32, 1e-4, device)


def test_codes_with_biases_and_a_clamped_gate(device: torch.device) -> None:
    source, shape = with_biases.reference(), with_biases.shape_of(Share.all(with_biases.WIDTH))
    layer = with_biases.filled(TritonQuantizedExperts(INT8, INT8, online=True), BF16, shape, source, device)
    with_biases.check(source, [layer], 9, BF16, 0.06, device)


def test_a_layer_of_which_some_experts_are_elsewhere(device: torch.device) -> None:
    shape = ExpertsShape(6, 3, 64, Share.all(32))
    layer = filled(shape, BF16, device)
    for tokens in (0, 1, 20):
        x, ids, weights = inputs(shape, tokens, 2, BF16)
        out = layer.forward(x.to(device), ids.to(device), weights.to(device))
        with torch.inference_mode():
            expected = reference(shape)(x.float(), ids, weights * (ids < 3))
        torch.testing.assert_close(out.cpu().float(), expected, atol=0.03, rtol=0.03)


def test_nothing_loaded_adds_nothing(device: torch.device) -> None:
    layer = Experts(NAMES, ExpertsShape(6, 3, 64, Share.all(32)), TritonExperts(), BF16, device)
    out = layer.forward(torch.ones(2, 64, dtype=BF16, device=device), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    assert not out.any()


@pytest.mark.parametrize(
    ("tokens", "dtype", "tiles"),
    [
        (1, BF16, FEW_ROWS),
        (64, BF16, FEW_ROWS),
        (256, BF16, SOME_ROWS),
        (1024, BF16, SOME_ROWS),
        (8192, BF16, MANY_ROWS),
        (8192, FP32, FP32_TILES),
    ],
)
def test_tiles_follow_the_rows_of_an_expert(tokens: int, dtype: torch.dtype, tiles: ExpertTiles) -> None:
    assert grouped.tiles_for(tokens, 8, 128, dtype) == tiles


@pytest.mark.parametrize(
    ("launch", "tokens"),
    [(moe_launches.experts, 1), (moe_launches.experts, 512), (moe_launches.experts, 8192), (moe_launches.biased_experts, 8192)],
)
def test_compiles_without_spills(launch: Callable[[int], None], tokens: int) -> None:
    found = {kernel.name: kernel for kernel in compiled(launch, tokens)}
    for kernel in found.values():
        assert kernel.stack == 0 and kernel.shared <= MAX_SHARED, kernel.name
    for kernel in (found["_gate_up"], found["_down"]):
        assert kernel.products == {"HGMMA" if tokens > 64 else "HMMA"} and not kernel.spills
        assert kernel.instructions["LDGSTS.E.BYPASS.128"] > 8 and kernel.in_flight >= IN_FLIGHT


@pytest.mark.parametrize("tokens", [1, 5])
def test_each_matrix_that_is_chosen_is_read_once(tokens: int, device: torch.device, watch: Watch) -> None:
    """And no other; a token's values are read again by each program that multiplies them."""
    if device.type != "cpu":
        pytest.skip("the interpreter counts")
    shape = ExpertsShape(7, 7, 128, Share.all(64))
    method = filled(shape, BF16, device).method
    assert isinstance(method, TritonExperts)
    x, ids, weights = inputs(shape, tokens, 2, BF16)
    ids = ids.where(ids < 4, 2)
    with watch.counted() as launches:
        grouped.experts(x, ids, weights, method.gate_ups, method.downs, FEW_ROWS)
    chosen = torch.zeros(7, 1, 1, dtype=torch.int64).index_fill_(0, ids.unique(), 1)
    for kernel in ("_gate_up", "_down"):
        (launch,) = (each for each in launches if each.kernel == kernel)
        assert torch.equal(launch.reads["weight"], chosen.expand_as(launch.reads["weight"])), kernel
