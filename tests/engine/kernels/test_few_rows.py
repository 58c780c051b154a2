"""Products of few rows with the norm, the gate and the residual in them: beside torch's, in a layer, and as they compile."""

from pathlib import Path

import pytest
import torch
from starling_engine.kernels import fused_rows as chosen
from starling_engine.kernels.fused_rows import MOST_ROWS, RowNorm, alone_rows, fused_rows
from starling_engine.layers.linear import Linear, stacked
from starling_engine.layers.linear_dense import DenseLinear
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.platforms.triton_support import H200, INTERPRETED
from torch.nn import functional as F

from tests.engine.checkpoints import PROMPT, VARIANTS, Variant, make_reference
from tests.engine.kernels.compiled import IN_FLIGHT, compiled
from tests.engine.kernels.guarded import Watch
from tests.engine.models.test_decoder import TOLERANCE, build
from tests.engine.paged_driver import PagedDriver

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5
ADA_SHARED = 99 << 10
"""Bytes of shared memory of a block on an Ada, the least that cards with bf16 have."""
SHAPES = [(1, 48, 64, FP32), (3, 35, 1000, BF16), (MOST_ROWS, 33, 512, FP32), (9, 16, 96, BF16)]


def some(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums in bf16 are rounded twice: x times the norm's weight, and in the end."""
    tolerance = 1e-5 if found.dtype == FP32 else 1e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize(("rows", "width", "depth", "dtype"), SHAPES)
@pytest.mark.parametrize("wide", [False, True])
def test_the_gated_product_of_the_norm(
    rows: int, width: int, depth: int, dtype: torch.dtype, wide: bool, device: torch.device, watch: Watch
) -> None:
    """Neither columns nor depth are whole tiles. Wide weights of the norm are of fp32. The matrix is read once."""
    from starling_engine.kernels.few_rows import few_rows_linear

    x, bias = 30 * some(rows, depth, dtype=dtype, device=device), some(2 * width, dtype=dtype, device=device)
    weight = some(2 * width, depth, dtype=dtype, device=device) / 16
    norm = RowNorm(some(depth, dtype=FP32 if wide else dtype, device=device), EPS)
    normal = F.rms_norm(x.float(), (depth,), norm.weight.float(), EPS)
    expected = F.linear(normal, weight.float(), bias.float())
    gate, up = expected.chunk(2, 1)
    same(few_rows_linear(x, weight, bias, norm), expected)
    with watch.counted() as launches:
        same(few_rows_linear(x, weight, bias, norm, gated=True), F.silu(gate) * up)
    for each in launches:
        # A program whose columns are not all there reads the last one again.
        assert each.reads["weight"].view(2, width, depth)[:, :-1].eq(1).all()


@pytest.mark.parametrize(("rows", "width", "depth", "dtype"), SHAPES)
def test_the_product_is_added_in_place(rows: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> None:
    from starling_engine.kernels.few_rows import few_rows_linear

    x, weight = some(rows, depth, dtype=dtype, device=device), some(width, depth, dtype=dtype, device=device) / 16
    stream = some(rows, width, dtype=dtype, device=device)
    expected = stream.float() + F.linear(x.float(), weight.float())
    found = few_rows_linear(x, weight, add_to=stream)
    assert found is stream
    same(found, expected)


@pytest.mark.parametrize(("rows", "width", "depth", "dtype"), SHAPES)
def test_the_product_alone_is_not_rounded(
    rows: int, width: int, depth: int, dtype: torch.dtype, device: torch.device, watch: Watch
) -> None:
    """As logits are. The matrix is read once."""
    from starling_engine.kernels.few_rows import few_rows_linear

    x, weight = some(rows, depth, dtype=dtype, device=device), some(width, depth, dtype=dtype, device=device) / 16
    out = torch.full((rows, width), torch.nan, device=device)
    with watch.counted() as launches:
        assert few_rows_linear(x, weight, out=out) is out
    same(out, F.linear(x.float(), weight.float()))
    for each in launches:
        assert each.reads["weight"][:-1].eq(1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the matrix is on the CPU, and the kernels are compiled here")
@pytest.mark.parametrize(("rows", "dtype"), [(1, BF16), (2, BF16), (1, FP32)])
def test_the_head_of_one_row_is_such_a_product(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """Of more rows torch reads it as fast, and in fp32 nothing is known."""
    monkeypatch.setenv(INTERPRETED, "1")
    x, weight = (some(*size, dtype=dtype, device=torch.device("cpu")) for size in ((rows, 64), (48, 64)))
    layer = Linear(stacked(["head"], [48], 64), DenseLinear(), dtype, x.device)
    layer.weight_slots()["head.weight"].load(weight)
    out = torch.full((rows, 48), torch.nan)
    with watch.counted() as launches:
        layer.forward_into(x, out)
    expected = F.linear(x.float(), weight.float())
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    assert [each.kernel for each in launches] == ["_few_rows"] * (rows == 1 and dtype == BF16)


def test_cards_before_hopper_have_the_head_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    assert alone_rows(BF16, torch.device("cpu")) == 1
    monkeypatch.setattr(chosen, "capability", lambda _: 89)
    assert alone_rows(BF16, torch.device("cpu")) == 0 < fused_rows(BF16, torch.device("cpu"))


def test_a_row_gives_the_same_in_every_place(device: torch.device) -> None:
    """A request's tokens do not depend on where in a step its row is, nor on the rows beside it."""
    from starling_engine.kernels.few_rows import few_rows_linear

    x, weight = some(1, 300, dtype=BF16, device=device).expand(5, -1).contiguous(), some(40, 300, dtype=BF16, device=device)
    x[1] = 1000
    found = few_rows_linear(x, weight, norm=RowNorm(torch.ones(300, dtype=BF16, device=device), EPS))
    assert all(torch.equal(found[at], found[0]) for at in (2, 3, 4)) and not torch.equal(found[1], found[0])


def test_layers_have_it_where_triton_runs_and_ranks_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")

    def most(dtype: torch.dtype = BF16, ranks: Communicator | None = None) -> int:
        return Linear(stacked(["o"], [8], 8), DenseLinear(), dtype, device, ranks).fused_rows

    monkeypatch.delenv(INTERPRETED, raising=False)
    assert most() == 0
    monkeypatch.setenv(INTERPRETED, "1")
    assert most() == fused_rows(BF16, device) == MOST_ROWS
    assert most(ranks=ALONE) == 0, "products are added up over ranks before they are added to the stream"
    assert most(torch.float16) == 0, "x times the norm's weight may be too large"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is on the CPU, and the kernels are compiled here")
@pytest.mark.parametrize("variant", [VARIANTS["qwen3-tied"], Variant("llama", {"head_dim": 32})], ids=str)
def test_a_model_with_it_answers_as_transformers(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """A prompt of more rows than it is for, and its last token as decodes are: in five launches a layer, also with head norms."""
    from starling_engine.attention.triton_paged import TritonAttention

    monkeypatch.setenv(INTERPRETED, "1")
    reference = make_reference(tmp_path, variant)
    model = build(reference, TritonAttention())
    driver = PagedDriver(model, FP32, block_size=16)
    (first,) = driver.run([(0, reference.prompt[:-1])])
    with watch.counted() as launches:
        (last,) = driver.run([(0, reference.prompt[-1:])])
    kernels = [each.kernel for each in launches]
    layer = ["_few_rows", "attention_kernel", "_few_rows", "_few_rows", "_few_rows"]
    assert kernels[: len(layer) * len(model.layers)] == layer * len(model.layers)
    torch.testing.assert_close(torch.cat([first, last]), reference.logits[:PROMPT], atol=TOLERANCE, rtol=0)


def launch(rows: int, width: int, depth: int, *, first: bool, gated: bool = False) -> None:
    """Multiplies as the first matrix of a part does, behind a norm, or as the last, whose product is added to the stream."""
    from starling_engine.kernels.few_rows import few_rows_linear

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device="meta")

    norm = RowNorm(empty(depth), EPS) if first else None
    weight = empty(2 * width if gated else width, depth)
    few_rows_linear(empty(rows, depth), weight, None, norm, gated=gated, add_to=None if first else empty(rows, width))


def launch_head() -> None:
    """Multiplies one row of Llama-3-8B by its head."""
    from starling_engine.kernels.few_rows import few_rows_linear

    x, weight = (torch.empty(size, dtype=BF16, device="meta") for size in ((1, 4096), (128256, 4096)))
    few_rows_linear(x, weight, out=torch.empty(1, 128256, device="meta"))


def test_the_head_is_asked_for_far_ahead() -> None:
    from starling_engine.kernels.few_rows import few_rows_tile

    (kernel,) = compiled(launch_head)
    tile = few_rows_tile(1, 128256, H200.processors, normed=False)
    of_matrix = tile.columns / (tile.columns + MOST_ROWS) * kernel.in_flight
    assert of_matrix >= IN_FLIGHT and kernel.shared <= ADA_SHARED and kernel.stack == 0 and kernel.products == {"HMMA"}


@pytest.mark.parametrize(
    ("rows", "width", "depth", "first", "gated"),
    [
        pytest.param(1, 6144, 4096, True, False, id="qkv"),
        pytest.param(1, 14336, 4096, True, True, id="gate and up", marks=pytest.mark.whole),
        pytest.param(1, 4096, 4096, False, False, id="o", marks=pytest.mark.whole),
        pytest.param(16, 4096, 14336, False, False, id="down, 16 rows"),
        pytest.param(1, 1024, 2048, False, False, id="o of Qwen3-0.6B", marks=pytest.mark.whole),
    ],
)
def test_the_matrix_is_asked_for_far_ahead(rows: int, width: int, depth: int, first: bool, gated: bool) -> None:
    """Enough of it, or half of a small one. All that the loop waits for was copied ahead. Llama-3-8B has the first four."""
    from starling_engine.kernels.few_rows import few_rows_tile

    (kernel,) = compiled(launch, rows, width, depth, first=first, gated=gated)
    columns = 2 * width if gated else width
    tile = few_rows_tile(rows, columns, H200.processors, normed=first)
    programs = -(-columns // tile.columns)
    of_matrix = tile.columns / (tile.columns + MOST_ROWS) * kernel.in_flight / kernel.blocks
    at_once = min(programs / H200.processors, kernel.blocks) * of_matrix
    assert at_once >= min(IN_FLIGHT, columns * depth * 2 / H200.processors / 2)
    assert kernel.shared <= ADA_SHARED and kernel.stack == 0 and kernel.products == {"HMMA"}
    assert not any(each.startswith("LDG.") for each in kernel.instructions) or not first
