"""The latent attention of the kernels, in each form, against attention over expanded keys and values written out in full."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from starling_engine.attention import mla_triton
from starling_engine.attention.mla_base import MlaWeights
from starling_engine.attention.mla_triton import SequenceRun, TritonMla, plan_runs
from starling_engine.kernels import mla
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import QueryBlocks
from starling_engine.layers.rope import no_rotation
from starling_engine.model_config.mla_shape import MlaShape, QuerySpan

from tests.engine.attention.test_mla import SHAPES, SIZES, V3, weights, whole
from tests.engine.attention.test_paged import BLOCK, metadata
from tests.engine.kernels import moe_launches
from tests.engine.kernels.compiled import IN_FLIGHT, MAX_SHARED, compiled
from tests.engine.kernels.guarded import Watch
from tests.engine.slabs import assert_untouched, in_slabs

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TABLES = torch.tensor([[7, 2, 9, 4, 1], [3, 8, 5, 0, 0], [6, 10, 0, 0, 0]], dtype=torch.int32)


class Expanding(MlaShape):
    def most_absorbed(self, context: int) -> int:  # noqa: ARG002 - whatever the context
        return 0


def on(device: torch.device, meta: AttentionMetadata, *, known: bool) -> AttentionMetadata:
    """Makes metadata with the lengths that the host knows, or without."""
    lens = (meta.query_start.tolist(), meta.context_lens.tolist()) if known else None
    names = ("positions", "slot_mapping", "query_start", "context_lens", "block_tables")
    return replace(meta, **{name: getattr(meta, name).to(device) for name in names}, host_lens=lens)


def moved(layer: MlaWeights, dtype: torch.dtype, device: torch.device) -> MlaWeights:
    return replace(layer, cos_sin=layer.cos_sin.to(device), w_uk=layer.w_uk.to(device, dtype), w_uv=layer.w_uv.to(device, dtype))


@pytest.mark.parametrize(
    ("name", "form", "dtype", "tolerance"),
    [
        ("pairs", "absorbed", FP32, 1e-5),
        ("pairs", "expanded", FP32, 1e-5),
        ("halves", "cheaper", FP16, 0.01),
        ("wide values", "expanded", BF16, 0.05),
        ("one head", "absorbed", BF16, 0.05),
        ("latents narrower than heads", "cheaper", BF16, 0.05),
    ],
)
def test_equals_attention_written_out(
    name: str, form: str, dtype: torch.dtype, tolerance: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of different lengths, in chunks that end inside blocks, then one token each, with contexts that are split."""
    monkeypatch.setattr(mla, "SEGMENT_KEYS", 8)
    monkeypatch.setattr(mla_triton, "SHORT", 1)
    monkeypatch.setattr(mla_triton, "sms", lambda _: 8)
    layer = weights((Expanding if form == "expanded" else MlaShape)(**SHAPES[name]))
    narrow, shape, generator = moved(layer, dtype, device), layer.shape, torch.Generator().manual_seed(0)
    widths = (shape.num_heads * shape.key_dim, shape.kv_rank, shape.rope_dim)
    sequences = [[torch.randn(length, width, generator=generator).to(dtype) for width in widths] for length in (36, 19, 8)]
    kv = in_slabs(torch.full((12, BLOCK, shape.latent_dim), float("nan"), dtype=dtype, device=device))
    done, found = [0, 0, 0], [[], [], []]
    for counts in ((21, 3, 1), (1, 15, 1), (13, 0, 5), (1, 1, 1)):
        rows = [(start, count) for start, count in zip(done, counts, strict=True)]
        parts = [[x[start : start + n] for x in xs] for xs, (start, n) in zip(sequences, rows, strict=True)]
        q, c, k_rope = (torch.cat(list(column)).to(device) for column in zip(*parts, strict=True))
        out = TritonMla().forward(q, c, k_rope, narrow, kv, on(device, metadata(rows, TABLES), known=form != "absorbed"))
        assert out.dtype == dtype
        for sequence, part in enumerate(out.cpu().split(counts)):
            found[sequence].append(part)
            done[sequence] += counts[sequence]
    assert done == [36, 19, 8]
    wide = replace(layer, w_uk=narrow.w_uk.cpu().float(), w_uv=narrow.w_uv.cpu().float())
    for parts, inputs in zip(found, sequences, strict=True):
        expected = whole(*(x.float() for x in inputs), wide)
        torch.testing.assert_close(torch.cat(parts).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("known", "lengths"), [(False, (9, 3, 1)), (True, (21, 1, 5)), (True, (2, 30, 3))])
def test_query_blocks_that_are_listed_give_the_same(
    known: bool, lengths: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: a list with room for more, of a whole step, or of one whose runs lie behind and around an expanded sequence."""
    monkeypatch.setattr(mla_triton, "SHORT", 8)
    layer = moved(weights(Expanding(**SHAPES["pairs"])), FP32, device)
    shape = layer.shape
    inputs = [torch.randn(sum(lengths), n, device=device) for n in (shape.num_heads * shape.key_dim, shape.kv_rank, shape.rope_dim)]
    meta = on(device, metadata([(0, length) for length in lengths], TABLES), known=known)
    blocks = QueryBlocks.of_latents(shape.num_heads, FP32.itemsize)
    listed = np.full((blocks.most(sum(lengths) + 30, 5), 2), -1, np.int32)
    found = blocks.listed(np.array(lengths, np.int32))
    assert 2 < len(found) < len(listed)
    listed[: len(found)] = found
    outputs = []
    for query_blocks in (None, torch.from_numpy(listed).to(device)):
        kv = in_slabs(torch.full((12, BLOCK, shape.latent_dim), float("nan"), device=device))
        outputs.append(TritonMla().forward(*inputs, layer, kv, replace(meta, query_blocks=query_blocks)))
    assert torch.equal(*outputs) and not outputs[0].isnan().any()


def test_each_latent_is_read_once_by_a_decode(device: torch.device, watch: Watch) -> None:
    """As key and as value, by all heads; and nothing else of the cache is."""
    if device.type != "cpu":
        pytest.skip("the interpreter counts")
    shape, lens = MlaShape(**SHAPES["pairs"]), torch.tensor([20, 1, 9], dtype=torch.int32)
    q_latent, q_rope = torch.randn(shape.num_heads, 3, shape.kv_rank), torch.randn(3, shape.num_heads, shape.rope_dim)
    kv, nothing = torch.randn(12, BLOCK, shape.latent_dim), torch.zeros(3, dtype=torch.int64)
    meta = AttentionMetadata(nothing, nothing, torch.arange(4, dtype=torch.int32), lens, TABLES, 1)
    with watch.counted() as launches:
        mla.attend(q_latent, q_rope, kv, meta, 0.1, sms=8)
    wanted = torch.zeros_like(kv, dtype=torch.int64)
    for table, length in zip(TABLES.long(), lens.tolist(), strict=True):
        for at in range(length):
            wanted[table[at // BLOCK], at % BLOCK] = 1
    assert torch.equal(launches[0].reads["kv"], wanted)


@pytest.mark.parametrize("name", ["pairs", "halves"])
def test_a_table_that_rotates_nothing_may_have_two_columns(name: str, device: torch.device) -> None:
    """So that a model without rotation has no table as wide as its keys, for a million positions."""
    layer = moved(weights(MlaShape(**SHAPES[name])), FP32, device)
    shape, tokens = layer.shape, 3
    inputs = [torch.randn(tokens, n, device=device) for n in (shape.num_heads * shape.key_dim, shape.kv_rank, shape.rope_dim)]
    meta = on(device, metadata([(0, tokens), (0, 0), (0, 0)], TABLES), known=False)
    still = torch.cat((torch.ones(9, shape.rope_dim // 2), torch.zeros(9, shape.rope_dim // 2)), dim=1).to(device)
    found = []
    for table in (still, no_rotation(9, device)):
        kv = in_slabs(torch.zeros(12, BLOCK, shape.latent_dim, device=device))
        found.append((TritonMla().forward(*inputs, replace(layer, cos_sin=table), kv, meta), kv.clone()))
    assert all(torch.equal(wide, narrow) for wide, narrow in zip(*found, strict=True))


def test_padding_stores_nothing_and_is_not_attended_to(device: torch.device) -> None:
    """A token of a sequence without context, a sequence without tokens, and a token of no sequence; tables may hold anything."""
    layer = moved(weights(MlaShape(**SIZES)), FP32, device)
    q, c, k_rope = (torch.randn(3, width, device=device) for width in (96, 32, 8))
    kv = in_slabs(torch.full((4, BLOCK, 40), 5.0, device=device))
    table = torch.tensor([[2], [1 << 30], [1 << 30]], dtype=torch.int32)
    meta = AttentionMetadata(
        torch.zeros(3, dtype=torch.int64), torch.tensor([2 * BLOCK, -1, -1]), torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        torch.tensor([1, 0, 0], dtype=torch.int32), table, 1,
    )  # fmt: skip
    out = TritonMla().forward(q, c, k_rope, layer, kv, on(device, meta, known=False))
    assert_untouched(kv)
    assert (kv != 5.0).any(-1).nonzero().tolist() == [[2, 0]]
    torch.testing.assert_close(out[0].view(4, 12), torch.einsum("hvr,r->hv", layer.w_uv, c[0]))
    assert not out[1].any()


def test_runs_are_neighbours_in_one_form() -> None:
    def span(row: int, start: int, queries: int, context: int) -> QuerySpan:
        return QuerySpan(row, start, queries, context)

    step = [span(0, 0, 1, 50), span(2, 1, 7, 7), span(3, 8, 500, 900), span(4, 508, 1, 9), span(5, 509, 300, 300)]
    blocks = QueryBlocks(tokens=4, short=0, decodes=1)
    plan = plan_runs(step, V3, blocks)
    assert plan.absorbed == [SequenceRun(0, 2, 0, 8, 7, 0, 3), SequenceRun(4, 4, 508, 509, 1, 128, 129)]
    assert plan.expanded == [step[2], step[4]]
    assert plan_runs(step[2:3], V3, blocks).absorbed == []


@pytest.mark.parametrize(
    ("programs", "longest", "segments"),
    [(2, 8192, 64), (128, 8192, 1), (40, 1 << 17, 2), (1, 100, 1), (1, 1000, 4), (500, 8192, 1)],
)
def test_contexts_are_split_to_fill_the_processors(programs: int, longest: int, segments: int) -> None:
    assert mla.segments_for(programs, longest, 132) == segments


@pytest.mark.parametrize(("rows", "queries", "heads"), [(1, 1, 128), (64, 1, 16), (8, 4, 16)])
def test_the_absorbed_form_compiles_without_spills(rows: int, queries: int, heads: int, triton: str | None) -> None:
    """Triton 3.9 keeps eight words of a thread in memory."""
    for kernel in compiled(moe_launches.absorbed, rows, queries, heads):
        assert kernel.stack <= (32 if triton == "3.9.0" else 0) and kernel.shared <= MAX_SHARED, kernel.name
        if kernel.name == "_attend":
            assert kernel.products == {"HGMMA" if heads == 128 or queries > 1 else "HMMA"}
            assert kernel.spills == (kernel.stack > 0)
            assert kernel.instructions["LDGSTS.E.BYPASS.128"] > 8 and kernel.in_flight >= IN_FLIGHT


def test_the_expanded_form_and_the_store_compile_without_spills() -> None:
    attend, store = compiled(moe_launches.expanded)[0], compiled(moe_launches.store)[0]
    assert attend.stack == store.stack == 0 and attend.shared <= MAX_SHARED
    assert "wgmma.mma_async" in attend.ptx
