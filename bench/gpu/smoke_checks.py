"""The kernels that `smoke` runs, each beside torch's code for the same."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from starling_engine.kernels import prompt_lookup, token_words
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers import router
from starling_engine.layers.experts import ExpertsShape
from starling_engine.model_config.moe import Routing
from starling_engine.native import reference
from starling_engine.native.cache_rows import INT4, INT8, uncached
from starling_engine.native.group_quantized import Format, GroupQuantized
from starling_engine.native.sampling_metadata import sampling_metadata
from starling_engine.params import SamplingParams
from starling_engine.topology.shard import Share
from torch import Tensor
from torch.nn import functional as F

from bench.gpu.cases_attention import BLOCK, CACHES, LLAMA_8B, TOY, Heads, Paged, Step, in_cache
from bench.gpu.clock import Call
from bench.gpu.roofline import StepRow

BF16, FP32 = torch.bfloat16, torch.float32
ROUNDED = 2e-2
"""Sums in another order differ in bf16 by so much of the largest number."""
Result = Callable[[], Tensor]


@dataclass(frozen=True)
class Check:
    """`pair` draws inputs on a device, and gives the kernel's call and the reference's."""

    what: str
    pair: Callable[[torch.device], tuple[Result, Result]]
    tolerance: float = ROUNDED

    def make(self, device: torch.device) -> Call:
        return self.pair(device)[0]

    @staticmethod
    def error(found: Tensor, expected: Tensor) -> float:
        """The largest difference, of the largest number. NaN where one is NaN; equal infinities differ by nothing."""
        one, two = found.double(), expected.double()
        difference = torch.where(one == two, 0.0, (one - two).abs())
        return float(difference.max() / two[two.isfinite()].abs().max().clamp(min=1e-9))


def cases(*, toy: bool) -> list[Check]:
    """Returns the checks in bf16; a toy's in fp32, for the interpreter multiplies bits of bf16 as whole numbers."""
    half = FP32 if toy else BF16

    def step(sequences: int, new: int, context: int, cache: torch.dtype = half) -> Step:
        return Step(heads, sequences, StepRow(new, context), cache, half)

    heads, hidden, inner, vocab = (TOY, 64, 96, 1000) if toy else (LLAMA_8B, 4096, 14336, 128256)
    tokens, long, sequences = (3, 40, 2) if toy else (64, 1024, 64)
    return [
        _attention("prompt", step(1, long, long)),
        _attention("chunk", step(1, long // 4, long)),
        _attention("decode", step(sequences, 1, long)),
        _attention("decode of one", step(1, 1, 8 * long)),
        _attention("drafts", step(sequences, 4, long)),
        *(_attention("decode", step(sequences, 1, long, cache)) for cache in CACHES),
        *(_attention("prompt", step(1, long, long, cache)) for cache in (INT8, INT4)),
        _mixed(step(sequences, 1, long)),
        _mixed(step(min(8, sequences), 1, 2 * long)),
        _cascade(step(max(3, sequences), 1, 2 * long + BLOCK), 2 * BLOCK if toy else 2 * long),
        _store(heads, tokens),
        *(_store(heads, tokens, cache, step) for cache, step in ((INT8, ROUNDED), (INT4, 0.15))),
        _norm(tokens, hidden),
        _gate(tokens, inner),
        *(_few_rows(rows, hidden, inner, half) for rows in ((3,) if toy else (1, 16))),
        _raw_decode(step(sequences, 1, long)),
        _raw_decode(step(1, 1, 8 * long)),
        *(_sample(tokens, vocab, filtered=filtered) for filtered in (False, True)),
        _adjust(tokens, vocab),
        _mask(tokens, vocab),
        _drafts(sequences, long),
        *_experts(half, toy=toy),
        *_latents(half, toy=toy),
        *(_quantized(rows, hidden, half) for rows in ((3,) if toy else (1, 64, 1024))),
        *(_scaled(rows, hidden, form, name) for rows in ((3,) if toy else (1, 64, 1024)) for name, form in _FP8.items()),
        *(_sum_over_ranks(3 if toy else 64, hidden, kind) for kind in ("in one shot", "in two shots", "with a norm")),
    ]


def _attention(kind: str, step: Step) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.paged_attention import paged_attention

        p, scale = Paged.draw(step, device), step.heads.dim**-0.5
        inputs = (p.q, p.kv, p.tables, p.starts, p.contexts, scale)
        return lambda: paged_attention(*inputs, max_query_len=step.row.new), lambda: reference.paged_attention(*inputs)

    return Check(f"attention, {kind}, {step}", pair)


def _mixed(step: Step) -> Check:
    """A prompt, and decodes beside it."""
    heads, sequences = step.heads, step.sequences

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.paged_attention import paged_attention

        p, scale, prompt = Paged.draw(step, device), heads.dim**-0.5, step.row.context // 2
        q = torch.randn(prompt + sequences - 1, heads.queries, heads.dim, dtype=step.dtype, device=device)
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        starts[1:] += prompt - 1
        inputs = (q, p.kv, p.tables, starts, p.contexts, scale)
        return lambda: paged_attention(*inputs), lambda: reference.paged_attention(*inputs)

    return Check(f"attention, a prompt beside {step}", pair)


def _cascade(step: Step, shared: int) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.paged_attention import AttentionCall, cascade_attention

        p, scale = Paged.draw(step, device, shared), step.heads.dim**-0.5
        call = AttentionCall(q=p.q, kv=p.kv, block_tables=p.tables, query_start=p.starts, context_lens=p.contexts, scale=scale)
        inputs = (p.q, p.kv, p.tables, p.starts, p.contexts, scale)
        return lambda: cascade_attention(call, shared, 1), lambda: reference.paged_attention(*inputs)

    return Check(f"attention, cascade, {step}, {shared} of them shared", pair)


def _store(heads: Heads, tokens: int, cache: torch.dtype = BF16, tolerance: float = ROUNDED) -> Check:
    """A number between two codes may become either."""

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.store import qk_norm_rope_store

        qkv = torch.randn(tokens, (heads.queries + 2 * heads.keys) * heads.dim, dtype=BF16, device=device)
        turns = torch.rand(tokens, heads.dim // 2, device=device) * 6
        places = torch.cat((turns.cos(), turns.sin()), 1)
        norm, at = torch.randn(heads.dim, dtype=BF16, device=device), torch.arange(tokens, device=device)

        def stored(op: Callable[..., Tensor]) -> Tensor:
            kv = in_cache(torch.zeros(tokens // BLOCK + 1, 2, heads.keys, BLOCK, heads.dim, dtype=BF16, device=device), cache)
            return torch.cat((op(qkv, at, places, norm, norm, 1e-6, kv, at).flatten(), uncached(kv, BF16).flatten()))

        return lambda: stored(qk_norm_rope_store), lambda: stored(reference.qk_norm_rope_store)

    what = f"norm, rotation and store of {tokens} tokens"
    return Check(f"{what}, {CACHES[cache]} cache" if cache in CACHES else what, pair, tolerance)


def _norm(tokens: int, hidden: int) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.norm import add_rms_norm

        x, residual = (torch.randn(tokens, hidden, dtype=BF16, device=device) for _ in range(2))
        weight = torch.randn(hidden, dtype=BF16, device=device)

        def normed(op: Callable[..., None]) -> Tensor:
            out, total = torch.full_like(x, torch.nan), residual.clone()
            op(x, total, weight, 1e-6, out)
            return torch.cat((out, total))

        return lambda: normed(add_rms_norm), lambda: normed(reference.add_rms_norm)

    return Check(f"residual and norm, {tokens} x {hidden}", pair)


def _gate(tokens: int, inner: int) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.activation import silu_mul

        gate_up = torch.randn(tokens, 2 * inner, dtype=BF16, device=device)
        return lambda: silu_mul(gate_up), lambda: reference.silu_mul(gate_up)

    return Check(f"SiLU and product, {tokens} x {inner}", pair)


def _few_rows(rows: int, hidden: int, inner: int, dtype: torch.dtype) -> Check:
    """An MLP: its norm, gates, ups and downs, and the sum with what came in, in two launches."""

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.few_rows import few_rows_linear
        from starling_engine.kernels.fused_rows import RowNorm

        x, weight = (torch.randn(size, dtype=dtype, device=device) for size in ((rows, hidden), (hidden,)))
        gate_up, down = (torch.randn(size, dtype=dtype, device=device) for size in ((2 * inner, hidden), (hidden, inner)))
        gate_up, down = gate_up * hidden**-0.5, down * inner**-0.5

        def fused() -> Tensor:
            inside = few_rows_linear(x, gate_up, norm=RowNorm(weight, 1e-6), gated=True)
            return few_rows_linear(inside, down, add_to=x.clone())

        def written_out() -> Tensor:
            gate, up = F.linear(F.rms_norm(x.float(), (hidden,), weight.float(), 1e-6), gate_up.float()).chunk(2, 1)
            return x + F.linear(F.silu(gate) * up, down.float())

        return fused, written_out

    return Check(f"products with norm, gate and sum, {rows} x {hidden} x {inner}", pair)


def _raw_decode(step: Step) -> Check:
    """A decode from the product on: norms, rotation and store, attention, and the sum of its parts where there are some."""

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.paged_attention import AttentionCall, RawHeads, attend, most_arrived

        heads, sequences, last = step.heads, step.sequences, step.row.context - 1
        p = Paged.draw(step, device)
        width = (heads.queries + 2 * heads.keys) * heads.dim
        qkv, norm = (torch.randn(size, dtype=step.dtype, device=device) for size in ((sequences, width), (heads.dim,)))
        turns = torch.rand(step.row.context, heads.dim // 2, device=device) * 6
        at, slots = torch.full((sequences,), last, device=device), p.tables[:, last // BLOCK].long() * BLOCK + last % BLOCK
        places = at, torch.cat((turns.cos(), turns.sin()), 1), norm, norm, 1e-6
        names = ("positions", "cos_sin", "q_norm", "k_norm", "eps")
        raw = RawHeads(qkv=qkv, slot_mapping=slots, **dict(zip(names, places, strict=True)))
        arrived = torch.zeros(most_arrived(device), dtype=torch.int32, device=device)
        rest, scale = {"block_tables": p.tables, "query_start": p.starts, "context_lens": p.contexts}, heads.dim**-0.5

        def once() -> Tensor:
            kv, q = p.kv.clone(), raw.queries(heads.dim, heads.keys)
            out = attend(AttentionCall(q=q, kv=kv, scale=scale, raw=raw, arrived=arrived, **rest), 1)
            return torch.cat((out.flatten(), kv.flatten()))

        def written_out() -> Tensor:
            kv = p.kv.clone()
            q = reference.qk_norm_rope_store(qkv, *places, kv, slots)
            return torch.cat((reference.paged_attention(q, kv, *rest.values(), scale).flatten(), kv.flatten()))

        return once, written_out

    return Check(f"norm, rotation, store and attention, {step}", pair)


def _sample(rows: int, vocab: int, *, filtered: bool) -> Check:
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.8) if filtered else SamplingParams()

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.sample import sample

        logits, at = 3 * torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
        metadata = sampling_metadata([params] * rows, device)
        return lambda: sample(logits, metadata, at, at, filtered=filtered), lambda: reference.sample(logits, metadata, at, at)

    return Check(f"sampling, {rows} x {vocab}{', top-k 20, top-p 0.8' if filtered else ''}", pair, 0.0)


def _adjust(rows: int, vocab: int) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.adjust import adjust

        logits, slots = 3 * torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
        words = torch.randint(0, 64, (rows, vocab), dtype=torch.int32, device=device)
        inputs = (logits, slots, words, slots, torch.rand(rows, 3, device=device) + 0.5, slots % 2 == 0)
        return lambda: adjust(*inputs), lambda: token_words.adjust(*inputs)

    return Check(f"penalties, {rows} x {vocab}", pair, 1e-6)


def _mask(rows: int, vocab: int) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.token_bitmask import apply_token_bitmask

        logits, at = torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
        words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), dtype=torch.int32, device=device)

        def masked(op: Callable[..., None]) -> Tensor:
            changed = logits.clone()
            op(changed, at, words)
            return changed

        return lambda: masked(apply_token_bitmask), lambda: masked(reference.apply_token_bitmask)

    return Check(f"masks, {rows} x {vocab}", pair, 0.0)


def _drafts(rows: int, long: int) -> Check:
    """Returns the check of drafts from texts of four words, in which nearly all has come before."""

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.ngram_drafts import ngram_drafts

        tokens = torch.randint(0, 4, (rows, long), dtype=torch.int32, device=device)
        ids = torch.full((rows * 4 + 1,), -1, device=device)
        ids[: rows * 4 : 4] = tokens[:, -1]
        starts, slots = torch.full((rows,), -1, device=device), torch.arange(rows, device=device)
        lengths, bounds = torch.full((rows,), long, device=device), torch.arange(rows + 1, dtype=torch.int32, device=device) * 4

        def drafted(op: Callable[..., None]) -> Tensor:
            made = ids.clone()
            op(made, bounds, slots, starts, lengths, tokens, shortest=2, longest=5, most=3)
            return made[:-1]  # behind them lies what is fed to nobody

        return lambda: drafted(ngram_drafts), lambda: drafted(prompt_lookup.ngram_drafts)

    return Check(f"drafts by prompt lookup, {rows} x {long}", pair, 0.0)


def _experts(dtype: torch.dtype, *, toy: bool) -> list[Check]:
    hidden, inner, experts, top_k = (64, 32, 8, 2) if toy else (2048, 768, 128, 8)
    routing = Routing(num_experts=experts, top_k=top_k, renormalize=True)
    sizes = (3,) if toy else (1, 64, 2048)
    return [_route(sizes[-1], routing), *(_expert_products(tokens, hidden, inner, routing, dtype) for tokens in sizes)]


def _route(tokens: int, routing: Routing) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.routing import route

        logits = torch.randn(tokens, routing.num_experts, device=device)

        def spread(chosen: tuple[Tensor, Tensor]) -> Tensor:
            return torch.zeros_like(logits).scatter(1, chosen[1], chosen[0])

        return lambda: spread(route(logits, routing)), lambda: spread(router.route(logits, routing))

    return Check(f"routing, {tokens} tokens to {routing.top_k} of {routing.num_experts}", pair, 1e-5)


def _expert_products(tokens: int, hidden: int, inner: int, routing: Routing, dtype: torch.dtype) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.layers.experts_triton import TritonExperts

        method, experts = TritonExperts(), routing.num_experts
        parts = method.create(ExpertsShape(experts, experts, hidden, Share.all(inner)), dtype, device)
        matrices = []
        for slot in range(experts):
            shapes = [[share.size for share in part.shares] for part in parts]
            matrices.append([torch.randn(shape, dtype=dtype, device=device) * shape[1] ** -0.5 for shape in shapes])
            for part, matrix in zip(parts, matrices[-1], strict=True):
                method.load_part(slot, part, matrix)
        x = torch.randn(tokens, hidden, dtype=dtype, device=device)
        slots = torch.rand(tokens, experts, device=device).topk(routing.top_k).indices
        weights = torch.rand(tokens, routing.top_k, device=device)

        def summed() -> Tensor:
            total = torch.zeros(tokens, hidden, device=device)
            for slot, own in enumerate(matrices):
                gate, up, down = (m.float() for m in own)
                rows, choice = (slots == slot).nonzero(as_tuple=True)
                wide = x[rows].float()
                inside = (F.silu(wide @ gate.t()) * (wide @ up.t())).to(dtype).float()
                total.index_add_(0, rows, (inside @ down.t()) * weights[rows, choice, None])
            return total

        return lambda: method.apply(x, slots, weights), summed

    return Check(f"experts, {tokens} tokens, {hidden} x {inner}, {routing.top_k} of {routing.num_experts}", pair)


def _latents(dtype: torch.dtype, *, toy: bool) -> list[Check]:
    """Latent attention as it is (a decode), and expanded (a prompt); DeepSeek-V3's sizes."""
    sequences, context, heads, rank, rope = (2, 40, 4, 32, 16) if toy else (16, 1024, 128, 512, 64)
    return [
        _latent_decode(sequences, context, heads, rank, rope, dtype),
        _latent_prompt(context // 2, context, heads, rank // 4, rope, dtype),
    ]


def _latent_decode(sequences: int, context: int, heads: int, rank: int, rope: int, dtype: torch.dtype) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.mla import attend
        from starling_engine.kernels.paged_attention import sms

        each, scale = -(-context // BLOCK), (rank + rope) ** -0.5
        kv = torch.randn(sequences * each, BLOCK, rank + rope, dtype=dtype, device=device)
        q_latent = torch.randn(heads, sequences, rank, dtype=dtype, device=device)
        q_rope = torch.randn(sequences, heads, rope, dtype=dtype, device=device)
        tables = torch.randperm(sequences * each, device=device).int().view(sequences, each)
        meta = AttentionMetadata(
            positions=torch.full((sequences,), context - 1, device=device),
            slot_mapping=torch.full((sequences,), -1, device=device),
            query_start=torch.arange(sequences + 1, dtype=torch.int32, device=device),
            context_lens=torch.full((sequences,), context, dtype=torch.int32, device=device),
            block_tables=tables,
            max_query_len=1,
        )

        def written_out() -> Tensor:
            latents = kv[tables.long()].flatten(1, 2)[:, :context].float()
            q = torch.cat((q_latent.transpose(0, 1), q_rope), 2).float()
            weights = (torch.einsum("shd,scd->shc", q, latents) * scale).softmax(-1)
            return torch.einsum("shc,scr->hsr", weights, latents[..., :rank])

        return lambda: attend(q_latent, q_rope, kv, meta, scale, sms=sms(device)), written_out

    return Check(f"latent attention, decode, {sequences} x 1 of {context} tokens, {heads} heads", pair)


def _latent_prompt(new: int, context: int, heads: int, dim: int, rope: int, dtype: torch.dtype) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.mla_expanded import attend

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device)

        q, q_rope, k, k_rope = draw(new, heads, dim), draw(new, heads, rope), draw(context, heads, dim), draw(context, rope)
        v, scale = draw(context, heads, dim), (dim + rope) ** -0.5

        def attended() -> Tensor:
            out = torch.full((new, heads, dim), torch.nan, dtype=dtype, device=device)
            attend(q, q_rope, k, k_rope, v, scale, out)
            return out

        def written_out() -> Tensor:
            keys = torch.cat((k, k_rope[:, None].expand(-1, heads, -1)), 2).float()
            scores = torch.einsum("mhd,nhd->hmn", torch.cat((q, q_rope), 2).float(), keys) * scale
            position = torch.arange(context - new, context, device=device)[:, None]
            hidden = torch.arange(context, device=device) > position
            return torch.einsum("hmn,nhd->mhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v.float())

        return attended, written_out

    return Check(f"latent attention, expanded, {new} of {context} tokens, {heads} heads", pair)


def _quantized(rows: int, size: int, dtype: torch.dtype) -> Check:
    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.coded_weight import pack_codes
        from starling_engine.kernels.quantized_linear import quantized_linear
        from starling_engine.native.group_quantized import INT4, quantize

        matrix = quantize(torch.randn(size, size, generator=torch.Generator().manual_seed(0)) / size**0.5, INT4)
        weight, exact = pack_codes(matrix, device), matrix.dequantized().to(device, dtype)
        x = torch.randn(rows, size, dtype=dtype, device=device)
        return lambda: quantized_linear(x, weight), lambda: F.linear(x.float(), exact.float())

    return Check(f"quantized product, {rows} x {size} x {size}, int4", pair)


_FP8 = {
    "a scale a row and token": Format(8, 128, floats=True, by_row=True, rounding="token"),
    "blocks": Format(8, 128, floats=True, block_rows=128, rounding="group"),
}


def _scaled(rows: int, size: int, form: Format, name: str) -> Check:
    """Rounds rows, and multiplies them by `torch._scaled_mm` or a kernel; beside the product of the rounded numbers in fp32."""
    size = max(size, form.group)

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.rounded_rows import RowRounding, rounded_in_torch
        from starling_engine.kernels.scaled_linear import scaled_linear
        from starling_engine.kernels.scaled_weight import pack_scaled

        weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) / size**0.5
        scales = torch.full((size, size // form.group), weight.abs().max().item() / 448)
        codes = (weight / scales[0, 0]).to(torch.float8_e4m3fn).view(torch.uint8)
        matrix = GroupQuantized(codes, scales, form)
        packed, exact = pack_scaled(matrix, device), matrix.dequantized().to(device)
        x = torch.randn(rows, size, dtype=BF16, device=device)
        rounding = RowRounding(form.rounding)
        return lambda: scaled_linear(x, packed), lambda: F.linear(rounded_in_torch(x, rounding).numbers(), exact)

    return Check(f"product in FP8, {rows} x {size} x {size}, {name}", pair)


def _sum_over_ranks(rows: int, size: int, kind: str) -> Check:
    """Returns the check of one rank, which waits for no other."""

    def pair(device: torch.device) -> tuple[Result, Result]:
        from starling_engine.kernels.peer_sums import one_shot_sum, one_shot_sum_norm, region_bytes, two_shot_sum

        x = torch.randn(rows, size, dtype=BF16, device=device)
        weight, before = torch.randn(size, dtype=BF16, device=device), torch.randn_like(x)
        region = torch.zeros(region_bytes(1), dtype=torch.uint8, device=device)
        regions = torch.tensor([0 if device.type == "meta" else region.data_ptr()], dtype=torch.int64).to(device)

        def summed() -> Tensor:
            total = x.clone()
            if kind == "with a norm":
                one_shot_sum_norm(total, before.clone(), weight, 1e-5, regions, 0)
            else:
                (one_shot_sum if kind == "in one shot" else two_shot_sum)(total, regions, 0)
            return total + region[0] * 0  # which must live as long as its address is used

        return summed, lambda: F.rms_norm(x + before, (size,), weight, 1e-5) if kind == "with a norm" else x

    return Check(f"sum over one rank {kind}, {rows} x {size}", pair, ROUNDED if kind == "with a norm" else 0.0)
