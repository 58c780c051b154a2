"""The kernels that go row by row, all bound by memory: norms, the MLP's gate, products of few rows, sampling, penalties, masks."""

from collections.abc import Iterator

import torch
from starling_engine.native.sampling_metadata import GREEDY, sampling_metadata
from starling_engine.params import SamplingParams
from torch.nn import functional as F

from bench.gpu.case import Case
from bench.gpu.clock import Call
from bench.gpu.roofline import Cost

BF16 = torch.bfloat16
SAMPLED = {
    "greedy": (GREEDY, False),
    "temperature": (SamplingParams(), False),
    "top-k 20, top-p 0.8": (SamplingParams(temperature=0.7, top_k=20, top_p=0.8), True),
}
"""Parameters, and whether they filter."""


def cases(*, toy: bool) -> Iterator[Case]:
    hidden, inner, vocab = (64, 96, 1000) if toy else (4096, 14336, 128256)
    for tokens in (3,) if toy else (64, 8192):
        yield _norm(tokens, hidden)
        yield _gate(tokens, inner)
    shapes = ((96, 64, True),) if toy else ((6144, 4096, False), (28672, 4096, True), (4096, 4096, False), (4096, 14336, False))
    for rows in (3,) if toy else (1, 8, 16):
        for n, k, gated in shapes:
            yield _product(rows, n, k, gated=gated)
    yield _head(vocab, hidden)
    for rows in (2,) if toy else (1, 64):
        for name, (params, filtered) in SAMPLED.items():
            yield _sample(rows, vocab, name, params, filtered=filtered)
        yield _adjust(rows, vocab)
        yield _mask(rows, vocab)


def _norm(tokens: int, hidden: int) -> Case:
    def make(device: torch.device) -> Call:
        from starling_engine.kernels.norm import add_rms_norm

        x, residual = (torch.randn(tokens, hidden, dtype=BF16, device=device) for _ in range(2))
        weight, out = torch.randn(hidden, dtype=BF16, device=device), torch.empty_like(x)
        return lambda: add_rms_norm(x, residual, weight, 1e-6, out)

    return Case(what=f"residual and norm, {tokens} x {hidden}", make=make, cost=Cost(2.0 * 4 * tokens * hidden))


def _gate(tokens: int, inner: int) -> Case:
    def make(device: torch.device) -> Call:
        from starling_engine.kernels.activation import silu_mul

        gate_up = torch.randn(tokens, 2 * inner, dtype=BF16, device=device)
        return lambda: silu_mul(gate_up)

    return Case(what=f"SiLU and product, {tokens} x {inner}", make=make, cost=Cost(2.0 * 3 * tokens * inner))


def _product(rows: int, n: int, k: int, *, gated: bool) -> Case:
    """Reads rows and the matrix once. cuBLAS multiplies alone, without the norm before it."""

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.few_rows import few_rows_linear
        from starling_engine.kernels.fused_rows import RowNorm

        x, weight = torch.randn(rows, k, dtype=BF16, device=device), torch.randn(n, k, dtype=BF16, device=device)
        norm = RowNorm(torch.ones(k, dtype=BF16, device=device), 1e-6)
        return lambda: few_rows_linear(x, weight, norm=norm, gated=gated)

    def plain(device: torch.device) -> Call:
        x, weight = torch.randn(rows, k, dtype=BF16, device=device), torch.randn(n, k, dtype=BF16, device=device)
        return lambda: F.linear(x, weight)

    cost = Cost(2.0 * (n * k + rows * (n + k)), 2.0 * rows * n * k)
    what = f"norm and product{', gated' if gated else ''}, {rows} x {n} x {k}"
    return Case(what=what, make=make, cost=cost, rivals={"cuBLAS without the norm": plain})


def _head(n: int, k: int) -> Case:
    """Reads the matrix once, for one row, and writes fp32."""

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.few_rows import few_rows_linear

        x, weight = torch.randn(1, k, dtype=BF16, device=device), torch.randn(n, k, dtype=BF16, device=device)
        out = torch.empty(1, n, device=device)
        return lambda: few_rows_linear(x, weight, out=out)

    def plain(device: torch.device) -> Call:
        x, weight = torch.randn(1, k, dtype=BF16, device=device), torch.randn(n, k, dtype=BF16, device=device)
        return lambda: F.linear(x, weight)

    cost = Cost(2.0 * k * (n + 1) + 4.0 * n, 2.0 * n * k)
    return Case(what=f"head, 1 x {n} x {k}", make=make, cost=cost, rivals={"cuBLAS, rounded to bf16": plain})


def _sample(rows: int, vocab: int, name: str, params: SamplingParams, *, filtered: bool) -> Case:
    """Reads the logits at least once."""

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.sample import sample

        logits, at = 3 * torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
        metadata = sampling_metadata([params] * rows, device)
        return lambda: sample(logits, metadata, at, at, filtered=filtered)

    return Case(what=f"sampling, {rows} x {vocab}, {name}", make=make, cost=Cost(4.0 * rows * vocab))


def _adjust(rows: int, vocab: int) -> Case:
    """Reads logits and a word for each, and writes logits."""

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.adjust import adjust

        logits, slots = 3 * torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
        words = torch.randint(0, 64, (rows, vocab), dtype=torch.int32, device=device)
        penalties, below_min_tokens = torch.rand(rows, 3, device=device) + 0.5, torch.zeros(rows, dtype=torch.bool, device=device)
        return lambda: adjust(logits, slots, words, slots, penalties, below_min_tokens)

    return Case(what=f"penalties, {rows} x {vocab}", make=make, cost=Cost(12.0 * rows * vocab))


def _mask(rows: int, vocab: int) -> Case:
    """Reads and writes logits: each tile has a token that is forbidden."""

    def make(device: torch.device) -> Call:
        from starling_engine.kernels.token_bitmask import apply_token_bitmask

        logits, at = torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
        words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), dtype=torch.int32, device=device)
        return lambda: apply_token_bitmask(logits, at, words)

    return Case(what=f"masks, {rows} x {vocab}", make=make, cost=Cost(8.125 * rows * vocab))
