"""Paged attention in Triton against its torch reference, over a cache whose unused slots are NaN, so that a wrong read shows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from starling_engine.kernels.attention_plan import (
    MAX_DECODE_TOKENS,
    MAX_SEGMENTS,
    MERGED_ROWS,
    AttentionShape,
    QueryBlocks,
    decode_segments,
    decode_tiles,
)
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config.rope import RopeConfig
from starling_engine.native import reference
from starling_engine.native.cache_rows import FP8, INT4, INT8, cached, uncached
from torch import Tensor

from tests.engine.kernels.guarded import Watch
from tests.engine.slabs import in_slabs

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}
"""Tolerance, relative to the largest value of the reference, in fp32 of the same inputs. The weights are rounded to the type."""

PREFILL = ((37, 37), (20, 20))
"""(context, queries) of each sequence."""

CHUNKS = ((0, 0), (70, 33), (9, 9))
DECODE = ((70, 1), (0, 0), (1, 1), (0, 1), (33, 1))
"""Also rows of padding: without a query, and with one that sees nothing."""

DRAFT = ((40, 3), (65, 5))
EIGHT = ((70, 8), (33, 1), (64, 2), (3, 3), (100, 7), (0, 0), (90, 4), (17, 5), (8, 6), (0, 1))
"""Decodes with up to 7 drafts: across blocks and tiles, from a sequence's first token on, and padding among them."""

FEW = ((70, 8), (64, 2), (3, 3), (0, 0), (0, 1))
"""The same in half the time, for cases with many heads."""

MIXED = ((66, 1), (90, 41), (5, 1), (0, 0))


@dataclass(frozen=True)
class Case:
    rows: Sequence[tuple[int, int]]
    group: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None
    max_blocks: int = 12
    sinks: bool = False


CASES = {
    "prefill": Case(PREFILL),
    "chunks": Case(CHUNKS, group=4, head_dim=128),
    "mixed": Case(MIXED, group=4, block_size=8),
    "mixed in a window": Case(MIXED, group=3, block_size=32, window=21, max_blocks=3),
    "mixed in a window of a block, capped": Case(MIXED, kv_heads=1, window=16, soft_cap=3.0, dtype=FP16),
    "prefill in a window of several tiles": Case(((200, 70),), kv_heads=1, head_dim=128, window=130, max_blocks=13),
    "mixed with sinks, split": Case(((400, 1), (90, 41), (70, 3), (0, 0), (300, 1), (9, 6)), group=4, max_blocks=32, sinks=True),
    "mixed, split in a window, fp8": Case(((560, 1), (90, 41), (0, 1), (70, 7)), kv_heads=1, window=520, cache=FP8, max_blocks=36),
    "mixed, fp32": Case(MIXED, group=4, kv_heads=1, dtype=FP32),
    "prefill, fp32": Case(PREFILL, group=1, kv_heads=1, block_size=8, window=10, soft_cap=2.0, dtype=FP32, head_dim=80),
    "prefill, heads of 256": Case(PREFILL, head_dim=256, kv_heads=1),
    "mixed, heads of 512": Case(MIXED, group=3, head_dim=512, kv_heads=1),
    "prefill, heads of 96, 5 each": Case(PREFILL, group=5, head_dim=96, kv_heads=1),
    "prefill, fp8": Case(PREFILL, cache=FP8),
    "prefill, int8": Case(PREFILL, cache=INT8),
    "mixed in a window, heads of 96, int4": Case(MIXED, head_dim=96, window=21, cache=INT4, dtype=FP16),
    "mixed, int8, fp32": Case(MIXED, group=4, kv_heads=1, block_size=8, cache=INT8, dtype=FP32),
    "decode": Case(DECODE, group=4, head_dim=128),
    "decode, one head each": Case(DECODE, group=1, head_dim=80, dtype=FP16),
    "decode, 16 heads each": Case(DECODE, group=16, kv_heads=1, head_dim=256, block_size=32, max_blocks=6),
    "decode, 7 heads each, fp32": Case(DECODE, group=7, kv_heads=1, head_dim=96, block_size=8, dtype=FP32),
    "decode in a window, capped": Case(DECODE, group=8, kv_heads=1, window=12, soft_cap=4.0),
    "decode, fp8": Case(DECODE, cache=FP8, group=4),
    "decode, int8": Case(DECODE, cache=INT8, head_dim=128, soft_cap=4.0),
    "decode, int4": Case(DECODE, cache=INT4, head_dim=32, group=4, block_size=32, max_blocks=6),
    "decode, split": Case(DECODE, group=4, max_blocks=48),
    "decode, split in a window": Case(DECODE, window=520, max_blocks=80),
    "decode, split, fp32": Case(DECODE, head_dim=80, dtype=FP32, max_blocks=64, soft_cap=4.0),
    "drafts": Case(DRAFT, group=4),
    "drafts, split": Case(DRAFT, group=6, max_blocks=32, kv_heads=1),
    "drafts of any number": Case(EIGHT, group=8),
    "drafts of any number, split": Case(EIGHT, group=4, max_blocks=48),
    "drafts of any number, split in a window": Case(FEW, group=3, window=520, block_size=32, max_blocks=24),
    "drafts in a window, capped": Case(EIGHT, group=2, window=11, soft_cap=4.0, block_size=8, max_blocks=13),
    "drafts, split, 16 heads each": Case(FEW, group=16, kv_heads=1, max_blocks=48),
    "drafts, split, 32 heads each, fp8": Case(FEW, group=32, kv_heads=1, max_blocks=48, cache=FP8),
    "drafts, split, int8": Case(DRAFT, group=6, head_dim=96, kv_heads=1, max_blocks=32, cache=INT8),
    "drafts in a window, int4": Case(EIGHT, group=2, head_dim=256, window=11, cache=INT4),
    "drafts, heads of 512, int4": Case(FEW, group=8, kv_heads=1, head_dim=512, cache=INT4),
    "drafts, 12 heads of 256 each": Case(FEW, group=12, kv_heads=1, head_dim=256),
    "drafts, one head each, fp8": Case(EIGHT, group=1, head_dim=128, cache=FP8),
    "drafts, split, fp32": Case(FEW, group=7, kv_heads=1, head_dim=80, dtype=FP32, max_blocks=48),
    "prefill with sinks, in a window": Case(PREFILL, kv_heads=2, window=16, sinks=True),
    "mixed with sinks, capped": Case(MIXED, group=3, soft_cap=3.0, dtype=FP32, sinks=True),
    "decode with sinks": Case(DECODE, group=4, sinks=True, cache=FP8),
    "decode with sinks, split in a window": Case(DECODE, group=3, window=520, max_blocks=80, sinks=True),
    "drafts with sinks, split": Case(FEW, group=8, kv_heads=2, head_dim=80, max_blocks=48, sinks=True, cache=FP8),
}


@dataclass
class Inputs:
    q: Tensor
    kv: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    sinks: Tensor | None

    def widened(self, key_scale: float, value_scale: float) -> "Inputs":
        """The same in fp32, dequantised, and 0 where the cache holds nothing, for the reference multiplies by it."""
        scales = torch.tensor([key_scale, value_scale], device=self.kv.device)[:, None, None, None]
        return replace(self, q=self.q.float(), kv=(uncached(self.kv, FP32) * scales).nan_to_num(0.0))

    def all(self) -> tuple[Tensor, ...]:
        return self.q, self.kv, self.block_tables, self.query_start, self.context_lens


def make(case: Case, device: torch.device, shared: int = 0) -> Inputs:
    """Pages in shuffled order; what no query of a window reaches is page 0, of NaN as all that is not written.

    The first `shared` keys are the first sequence's for all.
    """
    generator = torch.Generator().manual_seed(7)
    contexts, counts = zip(*case.rows, strict=True)
    sequences, size = len(contexts), case.block_size
    pages = sequences * case.max_blocks + 1
    tables = (torch.randperm(pages - 1, generator=generator) + 1).view(sequences, case.max_blocks).int()
    tables[:, : shared // size] = tables[0, : shared // size]
    dtype = case.cache or case.dtype
    kv = cached(torch.full((pages, 2, case.kv_heads, size, case.head_dim), float("nan")), dtype, 1.0).to(dtype)
    for table, context, queries in zip(tables, contexts, counts, strict=True):
        first = max(0, context - queries - case.window + 1) if case.window else 0
        table[: first // size] = 0
        at = torch.arange(first // size * size, context)
        new = torch.randn(len(at), 2, case.kv_heads, case.head_dim, generator=generator)
        kv[table[at // size].long(), :, :, at % size] = cached(new, dtype, 1.0).to(dtype)
    q = torch.randn(sum(counts), case.group * case.kv_heads, case.head_dim, generator=generator).to(case.dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    sinks = 2 * torch.randn(q.shape[1], generator=generator) if case.sinks else None
    q, tables, starts, ends = (x.to(device) for x in (q, tables, starts, torch.tensor(contexts, dtype=torch.int32)))
    return Inputs(q, in_slabs(kv.to(device)), tables, starts, ends, sinks=None if sinks is None else sinks.to(device))


def expected(case: Case, inputs: Inputs, key_scale: float = 1.0, value_scale: float = 1.0) -> Tensor:
    wide = inputs.widened(key_scale, value_scale)
    return reference.paged_attention(*wide.all(), case.head_dim**-0.5, case.window, case.soft_cap, sinks=inputs.sinks)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    difference = (actual.float() - expected).abs().max().item()
    assert difference <= TOLERANCE[actual.dtype] * expected.abs().max().item()


WHOLE = ("drafts, split, 16 heads each", "drafts, split, fp32")
"""Other cases of every run have splits with more heads each, and splits in fp32."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.whole) if name in WHOLE else name for name in CASES])
def test_equals_the_reference(name: str, device: torch.device) -> None:
    from starling_engine.kernels.paged_attention import paged_attention

    case = CASES[name]
    inputs = make(case, device)
    scales = {"key_scale": 0.5, "value_scale": 3.0} if case.cache == FP8 else {}
    longest = max(queries for _, queries in case.rows)
    arguments = (*inputs.all(), case.head_dim**-0.5, case.window, case.soft_cap)
    actual = paged_attention(*arguments, max_query_len=longest, sinks=inputs.sinks, **scales)
    assert actual.dtype == case.dtype
    assert_close(actual, expected(case, inputs, **scales))


@pytest.mark.parametrize("name", ["mixed in a window", "mixed with sinks, split", "chunks", "mixed, fp32"])
def test_query_blocks_that_are_listed_give_the_same(name: str, device: torch.device) -> None:
    """A list with room for more, as in a recorded step, instead of a search: the same to the bit."""
    from starling_engine.kernels.paged_attention import paged_attention

    case = CASES[name]
    inputs, lengths = make(case, device), np.array([queries for _, queries in case.rows], np.int32)
    blocks = QueryBlocks.of(case.head_dim, case.dtype.itemsize, case.group)
    listed = np.full((blocks.most(int(lengths.sum()) + 50, len(lengths) + 3), 2), -1, np.int32)
    found = blocks.listed(lengths)
    assert 0 < len(found) < len(listed)
    listed[: len(found)] = found
    arguments = (*inputs.all(), case.head_dim**-0.5, case.window, case.soft_cap)
    options = {"max_query_len": int(lengths.max()), "sinks": inputs.sinks}
    actual = paged_attention(*arguments, **options, query_blocks=torch.from_numpy(listed).to(device))
    assert torch.equal(actual, paged_attention(*arguments, **options))
    with pytest.raises(AssertionError):
        listed[0] = -1
        actual.fill_(0)
        assert_close(
            paged_attention(*arguments, **options, query_blocks=torch.from_numpy(listed).to(device)), expected(case, inputs)
        )


def test_the_cases_take_the_ways_that_they_name() -> None:
    """Checks that each case takes the path that it is for, whatever the tuned numbers are."""
    for name, case in CASES.items():
        longest = max(queries for _, queries in case.rows)
        short = decode_tiles(case.head_dim, case.dtype.itemsize, case.group, longest) is not None
        assert short == name.startswith(("decode", "drafts")), name
        shape = AttentionShape(tokens=1, sequences=len(case.rows), heads=1, kv_heads=1, head_dim=64, itemsize=2)
        room = case.max_blocks * case.block_size
        split = decode_segments(shape, min(room, case.window or room), 132) > 1
        assert split == ("split" in name), name


def test_a_longest_query_that_is_not_known_may_be_any(device: torch.device) -> None:
    from starling_engine.kernels.paged_attention import paged_attention

    case = CASES["mixed"]
    inputs = make(case, device)
    assert_close(paged_attention(*inputs.all(), case.head_dim**-0.5), expected(case, inputs))


def test_large_scores_overflow_nowhere(device: torch.device) -> None:
    """Scores of thousands, below a cap and without one: one key takes all, and nothing is NaN."""
    from starling_engine.kernels.paged_attention import paged_attention

    for case in (CASES["prefill"], replace(CASES["prefill"], soft_cap=20.0)):
        inputs = make(case, device)
        inputs.q *= 300
        with np.errstate(over="ignore"):
            actual = paged_attention(*inputs.all(), case.head_dim**-0.5, case.window, case.soft_cap)
        assert_close(actual, expected(case, inputs))


RAW = {
    "split": (Case(DECODE, group=4, max_blocks=48, sinks=True), 64, False),
    "split, head norms, partly rotated, fp32": (Case(DECODE, head_dim=80, dtype=FP32, max_blocks=64), 48, True),
    "head norms, int4": (Case(DECODE, cache=INT4, head_dim=32, group=4, block_size=32, max_blocks=6), 32, True),
    "split in a window, fp8": (Case(DECODE, group=3, window=520, max_blocks=80, cache=FP8), 64, False),
    "many heads each, split": (Case(DECODE, group=16, kv_heads=1, max_blocks=48), 64, False),
}
"""Decodes from the product on: elements that rotate, and whether heads have norms."""


@pytest.mark.parametrize("name", RAW)
def test_a_decode_in_one_launch_is_that_of_several(name: str, device: torch.device, watch: Watch) -> None:
    """A decode's queries are normalised and rotated, and its token is stored, before it attends."""
    from starling_engine.kernels.paged_attention import AttentionCall, RawHeads, attend, most_arrived

    case, rotary, normed = RAW[name]
    once, twice = (make(case, device) for _ in range(2))
    counts = torch.tensor([queries for _, queries in case.rows], device=device)
    at = (once.context_lens.long() - 1)[counts > 0]
    pages = once.block_tables.long()[counts > 0].gather(1, at.clamp(min=0)[:, None] // case.block_size)[:, 0]
    slots = torch.where(at >= 0, pages * case.block_size + at % case.block_size, -1)
    width = (case.group + 2) * case.kv_heads * case.head_dim
    generator = torch.Generator().manual_seed(8)
    norms = [torch.rand(case.head_dim, generator=generator).to(device, case.dtype) if normed else None for _ in range(2)]
    raw = RawHeads(
        qkv=torch.randn(len(at), width, generator=generator).to(device, case.dtype),
        positions=at.clamp(min=0),
        slot_mapping=slots,
        cos_sin=build_cos_sin(RopeConfig(), rotary, 256, device),
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
    )
    arrived = torch.zeros(most_arrived(device), dtype=torch.int32, device=device)

    def call(inputs: Inputs) -> AttentionCall:
        return AttentionCall(
            q=raw.queries(case.head_dim, case.kv_heads),
            kv=inputs.kv,
            block_tables=inputs.block_tables,
            query_start=inputs.query_start,
            context_lens=inputs.context_lens,
            scale=case.head_dim**-0.5,
            window=case.window,
            key_scale=0.5 if case.cache == FP8 else 1.0,
            sinks=inputs.sinks,
            raw=raw,
            arrived=arrived,
        )

    with watch.counted() as launches:
        found = attend(call(once), 1)
    if device.type == "cpu":
        merged = ["_merge"] if case.group > MERGED_ROWS else []
        assert [each.kernel for each in launches] == ["attention_kernel", *merged] and not arrived.any()
    wanted = attend(replace(call(twice).stored(), arrived=None), 1)
    if normed and case.cache is None:
        # Squares are added up in another order.
        torch.testing.assert_close(once.kv, twice.kv, equal_nan=True)
    else:
        assert torch.equal(once.kv.view(torch.uint8), twice.kv.view(torch.uint8))
    assert_close(found, wanted.float())


CASCADES = {
    "decode with sinks, bf16": Case(((90, 1), (64, 0), (70, 1), (65, 1)), group=4, soft_cap=5.0, max_blocks=60, sinks=True),
    "mixed, fp32": Case(((90, 1), (128, 50), (66, 2)), group=4, soft_cap=5.0, dtype=FP32, max_blocks=60),
    "decode, int4": Case(((90, 1), (64, 0), (70, 1), (65, 1)), cache=INT4, max_blocks=60),
}


@pytest.mark.parametrize("name", CASCADES)
def test_cascade_equals_the_reference(name: str, device: torch.device) -> None:
    from starling_engine.kernels.paged_attention import AttentionCall, cascade_attention

    case = CASCADES[name]
    inputs = make(case, device, shared=64)
    call = AttentionCall(
        q=inputs.q,
        kv=inputs.kv,
        block_tables=inputs.block_tables,
        query_start=inputs.query_start,
        context_lens=inputs.context_lens,
        scale=case.head_dim**-0.5,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
    )
    longest = max(queries for _, queries in case.rows)
    assert_close(cascade_attention(call, 64, longest), expected(case, inputs))


def test_merging_parts_of_the_keys_is_attention_over_all(device: torch.device) -> None:
    """Compares with torch's softmax over all scores. A part without keys counts nothing, whatever its memory holds."""
    from starling_engine.kernels.split_attention import Partial, merge

    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 3, 5 * 8, generator=generator).double() * 4
    values = torch.randn(5 * 8, 80, generator=generator).double()
    parts = scores.view(2, 3, 5, 8)
    out = torch.einsum("thsk,skd->thsd", parts.softmax(-1), values.view(5, 8, 80)).float().contiguous()
    lse = (parts.logsumexp(-1) / torch.log(torch.tensor(2.0))).float()
    out[0, :, 2], lse[0, :, 2] = float("nan"), float("-inf")
    scores[0, :, 16:24] = float("-inf")
    actual = merge(Partial(out.to(device), lse.to(device)), FP32)
    torch.testing.assert_close(actual.cpu(), (scores.softmax(-1) @ values).float())
    assert (merge(Partial(out.to(device), torch.full_like(lse, float("-inf")).to(device)), BF16) == 0).all()


def test_segments_are_bounded() -> None:
    shape = AttentionShape(tokens=1, sequences=1, heads=8, kv_heads=1, head_dim=128, itemsize=2)
    assert [decode_segments(shape, longest, 132) for longest in (1, 511, 512, 4096, 1 << 20)] == [1, 1, 2, 16, MAX_SEGMENTS]
    many = replace(shape, sequences=512, kv_heads=8)
    assert decode_segments(many, 1 << 20, 132) == 1


ONCE = ("decode", "decode, split", "decode, 16 heads each", "decode, fp8", "drafts, split", "mixed with sinks, split")


@pytest.mark.parametrize("name", ONCE)
def test_each_key_and_value_is_read_once(name: str, device: torch.device, watch: Watch) -> None:
    """By all query heads of a key-value head together, however contexts are split. Nothing else of the cache is read."""
    from starling_engine.kernels.paged_attention import paged_attention

    if device.type != "cpu":
        pytest.skip("the interpreter counts")
    case = replace(CASES[name], rows=tuple(row for row in CASES[name].rows if row[1] <= MAX_DECODE_TOKENS))
    inputs = make(case, device)
    longest = max(queries for _, queries in CASES[name].rows)
    with watch.counted() as launches:
        paged_attention(*inputs.all(), case.head_dim**-0.5, max_query_len=longest, sinks=inputs.sinks)
    reads = sum(launch.reads["kv"] for launch in launches if launch.kernel == "attention_kernel")
    wanted = torch.zeros_like(reads)
    for table, (context, queries) in zip(inputs.block_tables.long(), case.rows, strict=True):
        for at in range(context if queries else 0):
            wanted[table[at // case.block_size], :, :, at % case.block_size] = 1
    assert torch.equal(reads, wanted)
