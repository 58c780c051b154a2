"""Latent attention, in each of its forms, against attention over expanded keys and values written out in full."""

from dataclasses import replace

import pytest
import torch
from starling_engine.attention import mla_torch
from starling_engine.attention.mla_torch import MlaWeights, TorchMla
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config import mla_shape
from starling_engine.model_config.mla_shape import MlaShape, QuerySpan, plan_forms, spans
from starling_engine.model_config.rope import RopeConfig

from tests.engine.attention.test_paged import BLOCK, metadata
from tests.engine.late_device import READS
from tests.engine.slabs import assert_untouched, in_slabs

CPU = torch.device("cpu")


class Absorbing(MlaShape):
    """Always takes the absorbed form."""

    def most_absorbed(self, context: int) -> int:
        return context


class Expanding(MlaShape):
    """Never takes it."""

    def most_absorbed(self, context: int) -> int:  # noqa: ARG002 - whatever the context
        return 0


SIZES = {"num_heads": 4, "q_rank": 0, "kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 12, "interleaved": True}
SHAPES = {
    "pairs": SIZES,
    "halves": {**SIZES, "interleaved": False},
    "wide values": {**SIZES, "value_dim": 40},
    "one head": {**SIZES, "num_heads": 1, "value_dim": 24},
    "latents narrower than heads": {**SIZES, "kv_rank": 8},
}
FORMS = {"absorbed": Absorbing, "expanded": Expanding, "the cheaper": MlaShape}


def weights(shape: MlaShape) -> MlaWeights:
    generator = torch.Generator().manual_seed(3)
    w_uk, w_uv = (
        torch.randn(shape.num_heads, dim, shape.kv_rank, generator=generator) * shape.kv_rank**-0.5
        for dim in (shape.nope_dim, shape.value_dim)
    )
    return MlaWeights(shape, 0.3, build_cos_sin(RopeConfig(), shape.rope_dim, 256, CPU), w_uk, w_uv)


def turned(x: torch.Tensor, layer: MlaWeights) -> torch.Tensor:
    """Rotates by complex numbers: x [T, heads, rope_dim], the tokens 0 .. T - 1."""
    half = layer.shape.rope_dim // 2
    table = layer.cos_sin[: len(x)]
    turns = torch.complex(table[:, :half], table[:, half:])[:, None]
    pairs = x.unflatten(-1, (half, 2)) if layer.shape.interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns).flatten(-2)


def whole(q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, layer: MlaWeights) -> torch.Tensor:
    """One sequence from its first token on -> [T, H * value_dim]."""
    shape, tokens = layer.shape, len(q)
    nope, rope = q.view(tokens, shape.num_heads, -1).split([shape.nope_dim, shape.rope_dim], -1)
    keys, values = torch.einsum("tr,hdr->thd", c, layer.w_uk), torch.einsum("tr,hdr->thd", c, layer.w_uv)
    scores = torch.einsum("qhd,khd->hqk", nope, keys)
    scores += torch.einsum("qhd,kd->hqk", turned(rope, layer), turned(k_rope[:, None], layer)[:, 0])
    hidden = torch.ones(tokens, tokens).triu(1).bool()
    shares = (scores * layer.scale).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
@pytest.mark.matrix
def test_equals_attention_written_out(
    name: str, form: str, dtype: torch.dtype, tolerance: float, tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of different lengths, in chunks that end inside blocks, then one token each. Tight: all done in small pieces."""
    if tight:
        monkeypatch.setattr(mla_shape, "SCRATCH", 8000)
        monkeypatch.setattr(mla_shape, "QUERY_ROWS", 6)
        monkeypatch.setattr(mla_torch, "QUERY_ROWS", 6)
    layer = weights(FORMS[form](**SHAPES[name]))
    narrow = replace(layer, w_uk=layer.w_uk.to(dtype), w_uv=layer.w_uv.to(dtype))
    shape, generator = layer.shape, torch.Generator().manual_seed(0)
    widths = (shape.num_heads * shape.key_dim, shape.kv_rank, shape.rope_dim)
    sequences = [[torch.randn(length, width, generator=generator).to(dtype) for width in widths] for length in (37, 20, 9)]
    kv = in_slabs(torch.full((12, BLOCK, shape.latent_dim), float("nan"), dtype=dtype))
    tables = torch.tensor([[7, 2, 9, 4, 1], [3, 8, 5, 0, 0], [6, 10, 0, 0, 0]], dtype=torch.int32)
    done, found = [0, 0, 0], [[], [], []]
    for counts in ((21, 3, 1), (1, 15, 1), (13, 0, 5), (1, 1, 1), (1, 1, 1)):
        rows = [(start, count) for start, count in zip(done, counts, strict=True)]
        parts = [[x[start : start + n] for x in xs] for xs, (start, n) in zip(sequences, rows, strict=True)]
        q, c, k_rope = (torch.cat(list(column)) for column in zip(*parts, strict=True))
        out = TorchMla().forward(q, c, k_rope, narrow, kv, metadata(rows, tables))
        assert out.dtype == dtype
        for sequence, part in enumerate(out.split(counts)):
            found[sequence].append(part)
            done[sequence] += counts[sequence]
    assert done == [37, 20, 9]
    for parts, inputs in zip(found, sequences, strict=True):
        wide = replace(layer, w_uk=narrow.w_uk.float(), w_uv=narrow.w_uv.float())
        expected = whole(*(x.float() for x in inputs), wide)
        torch.testing.assert_close(torch.cat(parts).float(), expected, atol=tolerance, rtol=tolerance)


def test_a_token_without_a_slot_stores_nothing() -> None:
    layer = weights(MlaShape(**SIZES))
    kv = in_slabs(torch.full((4, BLOCK, 40), 5.0))
    meta = metadata([(0, 3)], torch.tensor([[2]], dtype=torch.int32))
    meta.slot_mapping[1] = -1
    TorchMla().forward(torch.randn(3, 96), torch.randn(3, 32), torch.randn(3, 8), layer, kv, meta)
    assert_untouched(kv)
    written = (kv != 5.0).any(-1)
    assert written.nonzero().tolist() == [[2, 0], [2, 2]]


def test_a_step_asks_the_device_for_its_lengths_once_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a step use what the first one has read. Where the host knows the lengths, nothing is read."""
    layer, asked = weights(MlaShape(**SIZES)), []
    kv = torch.zeros(8, BLOCK, 40)
    inputs = torch.randn(10, 96), torch.randn(10, 32), torch.randn(10, 8)
    for known in (False, True):
        meta = metadata([(0, 9), (6, 1)], torch.tensor([[2, 3], [4, 5]], dtype=torch.int32))
        if known:
            meta.exact_lens = [0, 9, 10], [9, 7]
        with monkeypatch.context() as patch:
            for name in READS:
                read = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, lambda *args, read=read, name=name: (asked.append(name), read(*args))[1])
            for _ in range(3):
                TorchMla().forward(*inputs, layer, kv, meta)
        assert asked == ["tolist"] * 2


def cost(shape: MlaShape, queries: int, context: int) -> tuple[int, int]:
    """Returns the cost of the absorbed and of the expanded form, for a head, counted matrix by matrix."""
    rank, nope, value, pairs = shape.kv_rank, shape.nope_dim, shape.value_dim, 2 * mla_shape.ATTENTION_COST * queries * context
    absorbed = queries * nope * rank + pairs * shape.latent_dim + queries * rank * value
    expanded = context * rank * nope + context * rank * value + pairs * shape.expanded_dim
    return absorbed, expanded


V3 = MlaShape(num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True)


@pytest.mark.parametrize("context", [1, 2, 40, 170, 1000, 100_000])
@pytest.mark.parametrize("shape", [V3, MlaShape(**SIZES), MlaShape(**SHAPES["latents narrower than heads"])])
def test_the_form_that_costs_less_is_taken(shape: MlaShape, context: int) -> None:
    most = shape.most_absorbed(context)
    assert 0 <= most <= context
    for queries in {1, most // 2, most, most + 1, context} & set(range(1, context + 1)):
        absorbed, expanded = cost(shape, queries, context)
        assert (queries <= most) == (absorbed <= expanded)


def test_decoding_absorbs_and_long_prompts_expand() -> None:
    assert V3.most_absorbed(2) == 1
    assert 20 < V3.most_absorbed(512) <= V3.most_absorbed(8192) < 60


def test_spans_leave_out_what_has_no_tokens() -> None:
    assert spans([0, 3, 3, 4], [10, 7, 1]) == [QuerySpan(0, 0, 3, 10), QuerySpan(2, 3, 1, 1)]


def test_batches_have_equal_queries_and_fit() -> None:
    lengths = [5, 90_000, 17, 2000, 2000, 40, 30_000, 9, 1_000_000]
    decodes = [QuerySpan(row, row, 1, length) for row, length in enumerate(lengths)]
    others = [QuerySpan(9, 9, 4, 50), QuerySpan(10, 13, 4, 60), QuerySpan(11, 17, 2000, 2000), QuerySpan(12, 2017, 2000, 9000)]
    plan = plan_forms(decodes + others, V3)
    assert plan.expanded == others[2:]
    assert sorted((span for batch in plan.absorbed for span in batch), key=lambda span: span.row) == decodes + others[:2]
    for batch in plan.absorbed:
        longest = batch[-1].context
        assert {span.queries for span in batch} == {batch[0].queries} and max(span.context for span in batch) == longest
        assert len(batch) == 1 or len(batch) * V3.absorbed_elements(batch[0].queries, longest) <= mla_shape.SCRATCH
    assert max(map(len, plan.absorbed)) > 5


def test_the_memory_plan_covers_every_form() -> None:
    for queries, context in ((1, 100), (4096, 4096), (512, 163_840), (8192, 163_840)):
        most = V3.scratch_elements(queries, context)
        assert most >= V3.expanded_elements(V3.heads_at_once(context), context)
        assert most >= V3.absorbed_elements(min(queries, V3.most_absorbed(context)), context)
    assert V3.scratch_elements(8192, 163_840) * 2 < 2 << 30
