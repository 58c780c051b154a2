"""Attention over the paged cache, and what stores into it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from starling_engine.native.cache_rows import FP8, INT4, INT8, cached
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.case import Case, Maker
from bench.gpu.clock import Call
from bench.gpu.roofline import Cost, StepRow

BF16, BLOCK = torch.bfloat16, 16
CACHES = {FP8: "fp8", INT8: "int8", INT4: "int4"}
"""Types of a cache, other than that of the model."""


@dataclass(frozen=True, slots=True)
class Heads:
    """`queries` heads of `dim` elements share `keys` key-value heads."""

    queries: int
    keys: int
    dim: int

    def cost(self, sequences: int, row: StepRow, row_bytes: int) -> Cost:
        """The cost of attention: it reads queries, and keys and values in rows of so many bytes, and writes the output."""
        moved = 2.0 * 2 * row.new * self.queries * self.dim + 2 * row.context * self.keys * row_bytes
        return Cost(sequences * moved, 4.0 * sequences * self.queries * self.dim * row.seen())


LLAMA_8B, QWEN_A3B, TOY = Heads(32, 8, 128), Heads(32, 4, 128), Heads(4, 2, 32)


@dataclass(frozen=True, slots=True)
class Step:
    """`sequences` of `row` each; `cache` is the dtype of keys and values."""

    heads: Heads
    sequences: int
    row: StepRow
    cache: torch.dtype = BF16
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        what = f"{self.sequences} x {self.row.new} of {self.row.context} tokens, heads {self.heads.queries}/{self.heads.keys}"
        return f"{what}, {CACHES[self.cache]} cache" if self.cache in CACHES else what

    @property
    def cost(self) -> Cost:
        return self.heads.cost(self.sequences, self.row, in_cache(torch.empty(self.heads.dim), self.cache).nbytes)


def in_cache(x: torch.Tensor, cache: torch.dtype) -> torch.Tensor:
    """Returns x [..., D] as a cache of that dtype has it, [..., row]."""
    return cached(x, cache, 1.0).to(cache)


def cases(*, toy: bool) -> Iterator[Case]:
    long = 32 if toy else 8192
    for heads in (TOY,) if toy else (LLAMA_8B, QWEN_A3B):
        yield _prefill(Step(heads, 1, StepRow(long, long)))
    yield from _tries(Step(TOY if toy else LLAMA_8B, 1, StepRow(long, long)), toy=toy)
    yield _attention("prefill", Step(TOY if toy else LLAMA_8B, 1, StepRow(long // 4, long)))
    decodes = ((TOY, 2, 40),) if toy else ((LLAMA_8B, 1, 1024), (LLAMA_8B, 64, 1024), (LLAMA_8B, 256, 1024), (QWEN_A3B, 64, 8192))
    for heads, sequences, context in decodes:
        # One sequence of 1,024 tokens is read in a microsecond: that is below what any kernel takes to start.
        goal = 0.85 if sequences > 1 else None
        yield _attention("decode", Step(heads, sequences, StepRow(1, context)), goal)
    yield from _drafts(toy=toy)
    yield from _segments(Step(TOY, 2, StepRow(1, 200)) if toy else Step(LLAMA_8B, 1, StepRow(1, 1024)))
    yield _attention("decode", Step(TOY, 2, StepRow(1, 40), FP8) if toy else Step(LLAMA_8B, 64, StepRow(1, 1024), FP8))
    yield _cascade(Step(TOY, 3, StepRow(1, 48)) if toy else Step(LLAMA_8B, 64, StepRow(1, 4608)), 32 if toy else 4096)
    for tokens in (5,) if toy else (64, 8192):
        yield _store(TOY if toy else LLAMA_8B, tokens)


def _drafts(*, toy: bool) -> Iterator[Case]:
    """Decodes of 1, 2, 4 and 8 query tokens, the last ones drafts: each row beside that of a single token says what drafts cost."""
    contexts, batches = ((40,), (1, 3)) if toy else ((1024, 8192), (1, 32))
    for context, sequences, new in itertools.product(contexts, batches, (1, 2, 4, 8)):
        yield _attention("drafts", Step(TOY if toy else LLAMA_8B, sequences, StepRow(new, context)))


@dataclass(frozen=True, slots=True)
class Paged:
    """What a step is given; its pages lie in random order."""

    q: torch.Tensor
    kv: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor

    @staticmethod
    def draw(step: Step, device: torch.device, shared: int = 0) -> "Paged":
        """The first `shared` tokens of all sequences lie in the same pages."""
        heads, each = step.heads, -(-step.row.context // BLOCK)
        tables = torch.randperm(step.sequences * each, device=device).int().view(step.sequences, each)
        tables[:, : shared // BLOCK] = tables[0, : shared // BLOCK].clone()
        return Paged(
            q=torch.randn(step.sequences * step.row.new, heads.queries, heads.dim, dtype=step.dtype, device=device),
            kv=in_cache(
                torch.randn(step.sequences * each, 2, heads.keys, BLOCK, heads.dim, dtype=step.dtype, device=device), step.cache
            ),
            tables=tables,
            starts=torch.arange(step.sequences + 1, dtype=torch.int32, device=device) * step.row.new,
            contexts=torch.full((step.sequences,), step.row.context, dtype=torch.int32, device=device),
        )


def _tries(step: Step, *, toy: bool) -> Iterator[Case]:
    """Other layouts of `attention_plan` that may be better: what they take says which the engine should have."""
    from starling_engine.kernels import attention_plan, paged_attention

    for tiles in ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)) if not toy else ((16, 16, 4, 2),):
        own = attention_plan.AttentionTiles(*tiles)
        make = _patched(_paged(step), paged_attention, "prefill_tiles", lambda *_, own=own: own)
        what = f"attention, prefill, {step}, by {own.rows} rows and {own.keys} keys in {own.stages} stages"
        yield Case(what=what, make=make, cost=step.cost)


def _segments(step: Step) -> Iterator[Case]:
    from starling_engine.kernels import attention_plan

    for keys in (64, 128):
        make = _patched(_paged(step), attention_plan, "SEGMENT_KEYS", keys)
        yield Case(what=f"attention, decode, {step}, in segments of {keys}", make=make, cost=step.cost)


def _patched(make: Maker, module: object, name: str, value: object) -> Maker:
    """The same with another value of the engine's while it runs."""

    def other(device: torch.device) -> Call:
        call = make(device)

        def patched() -> object:
            with mock.patch.object(module, name, value):
                return call()

        return patched

    return other


def _attention(kind: str, step: Step, goal: float | None = None) -> Case:
    return Case(what=f"attention, {kind}, {step}", make=_paged(step), cost=step.cost, goal=goal)


def _paged(step: Step, shared: int = 0) -> Maker:
    def make(device: torch.device) -> Call:
        from starling_engine.kernels.paged_attention import paged_attention

        p = Paged.draw(step, device, shared)
        scale = step.heads.dim**-0.5
        return lambda: paged_attention(p.q, p.kv, p.tables, p.starts, p.contexts, scale, max_query_len=step.row.new)

    return make


def _prefill(step: Step) -> Case:
    """Beside torch's fused kernels, which are given keys and values without pages, one for each query head."""
    heads, tokens = step.heads, step.row.new

    def sdpa(backend: SDPBackend) -> Maker:
        def make(device: torch.device) -> Call:
            q, k, v = (torch.randn(1, heads.queries, tokens, heads.dim, dtype=BF16, device=device) for _ in range(3))

            def call() -> torch.Tensor:
                with sdpa_kernel(backend if device.type == "cuda" else SDPBackend.MATH):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            return call

        return make

    rivals = {"cuDNN's SDPA": sdpa(SDPBackend.CUDNN_ATTENTION), "FlashAttention's SDPA": sdpa(SDPBackend.FLASH_ATTENTION)}
    return Case(what=f"attention, prefill, {step}", make=_paged(step), cost=step.cost, goal=0.75, rivals=rivals)


def _cascade(step: Step, shared: int) -> Case:
    """Beside the kernel that reads the shared pages once for each sequence."""
    heads, alone = step.heads, step.row.context - shared
    moved = 2 * step.sequences * heads.queries + 2 * (shared + step.sequences * alone) * heads.keys
    cost = Cost(2.0 * moved * heads.dim, step.cost.flops)

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.paged_attention import AttentionCall as Attention
        from starling_engine.kernels.paged_attention import cascade_attention

        p = Paged.draw(step, device, shared)
        attention = Attention(
            q=p.q, kv=p.kv, block_tables=p.tables, query_start=p.starts, context_lens=p.contexts, scale=heads.dim**-0.5
        )
        return lambda: cascade_attention(attention, shared, 1)

    what = f"attention, cascade, {step}, {shared} of them shared"
    return Case(what=what, make=make, cost=cost, rivals={"no cascade": _paged(step, shared)})


def _store(heads: Heads, tokens: int) -> Case:
    """Reads and writes queries, keys and values; the table of rotations is read once a token."""
    width = (heads.queries + 2 * heads.keys) * heads.dim

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.store import qk_norm_rope_store

        qkv = torch.randn(tokens, width, dtype=BF16, device=device)
        cos_sin, norm = torch.randn(tokens, heads.dim, device=device), torch.randn(heads.dim, dtype=BF16, device=device)
        kv = torch.empty(tokens // BLOCK + 1, 2, heads.keys, BLOCK, heads.dim, dtype=BF16, device=device)
        at = torch.arange(tokens, device=device)
        return lambda: qk_norm_rope_store(qkv, at, cos_sin, norm, norm, 1e-6, kv, at)

    what = f"norm, rotation and store of {tokens} tokens, heads {heads.queries}/{heads.keys}"
    return Case(what=what, make=make, cost=Cost(tokens * (2.0 * 2 * width + 4 * heads.dim)))
