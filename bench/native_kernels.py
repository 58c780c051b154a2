"""Times the native CPU kernels against torch's own way, on the shapes of Qwen3-0.6B.

    python bench/native_kernels.py [--seconds 0.5] [--threads 2] [--only linear,quantized,tiles,decode,prefill,rows,sample]

Each number is the best of many runs, since a shared machine only ever makes them slower. GB/s counts the
weights, or the keys and values, read once; GFLOP/s counts multiplications and additions, of the causal half
where there is one.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the engine's processes: threads that spin would take the kernels' cores

import torch
from shared import machine
from starling_engine.native import elementwise_ops, instruction_set_name, ops, quantized_ops
from starling_engine.native.bindings import library
from starling_engine.native.cache_rows import cached
from starling_engine.native.group_quantized import FP8, INT4, INT8, Format, GroupQuantized
from starling_engine.native.sampling_metadata import GREEDY, sampling_metadata
from starling_engine.params import SamplingParams
from torch import Tensor
from torch.nn import functional as F

BF16 = torch.bfloat16
LAYERS = 28
LAYER_SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # qkv, o, gate_up, down
HEADS, KV_HEADS, DIM, BLOCK, VOCAB = 16, 8, 128, 16, 151936


class Clock:
    """Best wall time of a call, in seconds, over at least `seconds` of trying."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, call: Callable[..., object], *arguments: object) -> float:
        call(*arguments)
        best, end = float("inf"), time.perf_counter() + self.seconds
        while True:
            start = time.perf_counter()
            call(*arguments)
            now = time.perf_counter()
            best = min(best, now - start)
            if now > end:
                return best


def memory_bandwidth(clock: Clock) -> str:
    ones = torch.ones(100_000_000)
    return f"memory, sum of 0.4 GB: {0.4 / clock(ones.sum):.1f} GB/s"


def bench_linear(clock: Clock) -> Iterator[str]:
    weights = [torch.randn(shape).to(BF16) for _ in range(LAYERS) for shape in LAYER_SHAPES]
    size = sum(weight.numel() for weight in weights)
    start = time.perf_counter()
    packed = [ops.pack_linear(weight) for weight in weights]
    yield f"pack {size * 2 / 1e9:.2f} GB: {(time.perf_counter() - start) * 1e3:.0f} ms"
    # On CPUs without such products torch multiplies bf16 number by number: there its float32 is what one would take.
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    weights = weights if has_bf16 else [weight.float() for weight in weights]
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    kind = str(weights[0].dtype).removeprefix("torch.")
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 1024):
        x = {k: torch.randn(m, k).to(BF16) for k in (1024, 2048, 3072)}
        x_torch = {k: rows.to(weights[0].dtype) for k, rows in x.items()}

        def native(x: dict[int, Tensor] = x) -> None:
            for weight in packed:
                ops.linear(x[weight.k], weight)

        def plain(x: dict[int, Tensor] = x_torch) -> None:
            for weight in weights:
                F.linear(x[weight.shape[1]], weight)

        def onednn(x: dict[int, Tensor] = x_torch) -> None:
            for weight, other in zip(weights, reordered, strict=True):
                torch.ops.mkldnn._linear_pointwise(x[weight.shape[1]], other, None, "none", [], "")

        seconds = clock(native)
        yield (
            f"linear, {LAYERS} layers, M={m}: {seconds * 1e3:.2f} ms, {size * 2 / seconds / 1e9:.1f} GB/s, "
            f"{size * 2 * m / seconds / 1e9:.0f} GFLOP/s | F.linear, {kind}, {clock(plain) * 1e3:.2f} ms | "
            f"oneDNN packed {clock(onednn) * 1e3:.2f} ms | {memory_bandwidth(clock)}"
        )
    head = ops.pack_linear(torch.randn(VOCAB, 1024).to(BF16))
    for m in (1, 32):
        x_head = torch.randn(m, 1024).to(BF16)
        seconds = clock(ops.linear, x_head, head, None, torch.float32)
        yield f"head to fp32, M={m}: {seconds * 1e3:.2f} ms, {head.data.numel() * 2 / seconds / 1e9:.1f} GB/s"
    out, ids = torch.empty(1024, 1024, dtype=BF16), torch.randint(0, VOCAB, (1024,))
    yield f"embedding of 1024 tokens: {clock(ops.embedding_packed, ids, head, out) * 1e3:.3f} ms"


QUANTIZED = {
    "int8": INT8,
    "int4": INT4,
    "4 bits + minima": Format(4, minima=True),
    "4 bits, table": Format(4, table=tuple(range(-8, 8))),
    "5 bits + minima": Format(5, minima=True),
    "6 bits by 16": Format(6, group=16, zero=32),
    "2 bits by 16 + minima": Format(2, group=16, minima=True),
    "fp8": FP8,
}


def bench_quantized(clock: Clock) -> Iterator[str]:
    """Matrices in 2 to 8 bits beside those in bf16: the GB/s of what they read, and how many times as fast they are."""
    plain = [ops.pack_linear(torch.randn(shape).to(BF16)) for _ in range(LAYERS) for shape in LAYER_SHAPES]
    packed = {name: [pack_random(shape, form) for _ in range(LAYERS) for shape in LAYER_SHAPES] for name, form in QUANTIZED.items()}
    size = sum(weight.n * weight.k for weight in plain)
    for m in (1, 2, 4, 8, 16, 32, 128, 1024):
        x = {k: torch.randn(m, k).to(BF16) for k in (1024, 2048, 3072)}

        def in_bf16(x: dict[int, Tensor] = x) -> None:
            for weight in plain:
                ops.linear(x[weight.k], weight)

        def in_codes(name: str, x: dict[int, Tensor] = x) -> None:
            for weight in packed[name]:
                quantized_ops.quantized_linear(x[weight.k], weight)

        seconds = clock(in_bf16)
        line = f"quantized, {LAYERS} layers, M={m}: bf16 {seconds * 1e3:.2f} ms, {size * 2 * m / seconds / 1e9:.0f} GOP/s"
        for name, matrices in packed.items():
            ours, read = clock(in_codes, name), sum(matrix.nbytes for matrix in matrices)
            line += f" | {name} {ours * 1e3:.2f} ms, {read / ours / 1e9:.1f} GB/s, {size * 2 * m / ours / 1e9:.0f} GOP/s"
            line += f", {seconds / ours:.2f} times as fast"
        yield f"{line} | {memory_bandwidth(clock)}"


def bench_tiles(clock: Clock) -> Iterator[str]:
    """Measures the GOP/s of AMX's tiles in a loop in the first-level cache, and the share of them that layers reach."""
    threads = torch.get_num_threads()
    multiply, products = library().starling_multiply_in_cache, 1000
    codes = {group: Format(8, group=group, zero=128) for group in (32, 128)}
    for m in (64, 256, 1024) if instruction_set_name() == "amx" else ():
        x = {k: torch.randn(m, k).to(BF16) for k in (1024, 2048, 3072)}
        for kind, is_bytes in (("bf16", False), ("int8, groups of 32, to bf16", False), ("int8, groups of 128", True)):
            in_cache = 2 * 32 * 32 * (1024 if is_bytes else 512) * products * threads / clock(multiply, products, is_bytes, threads)
            group = 0 if kind == "bf16" else 128 if is_bytes else 32
            for shape in LAYER_SHAPES:
                if group:
                    seconds = clock(quantized_ops.quantized_linear, x[shape[1]], pack_random(shape, codes[group]))
                else:
                    seconds = clock(ops.linear, x[shape[1]], ops.pack_linear(torch.randn(shape).to(BF16)))
                rate = 2 * m * shape[0] * shape[1] / seconds
                share = f"{rate / 1e9:.0f} of {in_cache / 1e9:.0f} GOP/s, a share of {rate / in_cache:.2f}"
                yield f"tiles, {kind}, M={m} {shape}: {share}"


def pack_random(shape: tuple[int, int], form: Format) -> quantized_ops.PackedQuantized:
    if form.floats:  # as a weight's lie, whose largest are 448: few are subnormal, and those take longer
        codes = (torch.randn(shape) * 100).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = torch.randint(0, 2**form.bits, shape, dtype=torch.uint8)
    scales = torch.rand(shape[0], shape[1] // form.group).to(form.scale_dtype)
    return quantized_ops.pack_quantized(GroupQuantized(codes, scales, form, scales if form.minima else None))


def paged(
    sequences: int, tokens: int, context: int, heads: int, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, cache, block tables, query starts and contexts; the blocks are in random order."""
    blocks = -(-context // BLOCK)
    tables = torch.randperm(sequences * blocks).int().view(sequences, blocks)
    kv = torch.randn(sequences * blocks, 2, kv_heads, BLOCK, dim).to(BF16)
    q = torch.randn(sequences * tokens, heads, dim).to(BF16)
    starts = (torch.arange(sequences + 1) * tokens).int()
    return q, kv, tables, starts, torch.full((sequences,), context, dtype=torch.int32)


CACHES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


def bench_decode(clock: Clock) -> Iterator[str]:
    shapes = [(HEADS, KV_HEADS, DIM), (32, 8, 128), (32, 4, 128), (16, 8, 64), (8, 1, 256)]
    for sequences, context in ((1, 1024), (1, 8192), (32, 160), (32, 1024)):
        for heads, kv_heads, dim in shapes if sequences > 1 else shapes[:1]:
            case = paged(sequences, 1, context, heads, kv_heads, dim)
            seconds = clock(ops.paged_attention, *case, dim**-0.5)
            rounded = {name: cached(case[1], dtype, 1.0) for name, dtype in CACHES.items()}
            others = {name: clock(ops.paged_attention, case[0], kv, *case[2:], dim**-0.5) for name, kv in rounded.items()}
            times = ", ".join(f"{name} {other * 1e3:.3f} ms" for name, other in others.items())
            size = case[1].numel() * 2
            yield (
                f"decode, {sequences} x {context} tokens, H={heads} KVH={kv_heads} D={dim}: "
                f"{seconds * 1e3:.3f} ms, {size / seconds / 1e9:.1f} GB/s | "
                f"caches in {times} | {memory_bandwidth(clock)}"
            )


def bench_prefill(clock: Clock) -> Iterator[str]:
    x, packed = torch.randn(1024, 1024).to(BF16), ops.pack_linear(torch.randn(4096, 1024).to(BF16))
    for tokens, context, heads, kv_heads, dim in (
        (128, 128, HEADS, KV_HEADS, DIM),
        (1024, 1024, HEADS, KV_HEADS, DIM),
        (8192, 8192, HEADS, KV_HEADS, DIM),
        (512, 4096, HEADS, KV_HEADS, DIM),
        (2048, 2048, 32, 8, 64),
        (2048, 2048, 8, 1, 256),
    ):
        case = paged(1, tokens, context, heads, kv_heads, dim)
        seconds = clock(ops.paged_attention, *case, dim**-0.5)
        rate = 4 * heads * dim * sum(range(context - tokens + 1, context + 1)) / seconds / 1e9
        linear = 2 * 1024 * 1024 * 4096 / clock(ops.linear, x, packed) / 1e9
        line = (
            f"prefill, {tokens} of {context} tokens, H={heads} KVH={kv_heads} D={dim}: "
            f"{seconds * 1e3:.2f} ms, {rate:.0f} GFLOP/s, {100 * rate / linear:.0f}% of linear's"
        )
        if tokens == context:
            q, k = torch.randn(1, heads, tokens, dim).to(BF16), torch.randn(1, kv_heads, tokens, dim).to(BF16)
            sdpa = clock(partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True), q, k, k)
            line += f" | SDPA {sdpa * 1e3:.2f} ms"
        yield line


def bench_rows(clock: Clock) -> Iterator[str]:
    """The kernels that go row by row: norms, the gate, the rotary embedding."""
    cos_sin, norm = torch.randn(4096, DIM), torch.randn(DIM).to(BF16)
    for tokens in (1, 32, 1024):
        x, residual = torch.randn(tokens, 1024).to(BF16), torch.randn(tokens, 1024).to(BF16)
        weight, out = torch.randn(1024).to(BF16), torch.empty(tokens, 1024, dtype=BF16)
        gate_up = torch.randn(tokens, 6144).to(BF16)
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM).to(BF16)
        kv, slots = (
            torch.zeros(tokens // BLOCK + 1, 2, KV_HEADS, BLOCK, DIM, dtype=BF16),
            torch.arange(tokens),
        )
        seconds = {
            "add_rms_norm": clock(ops.add_rms_norm, x, residual, weight, 1e-6, out),
            "silu_mul": clock(elementwise_ops.activate_and_mul, "silu", gate_up),
            "qk_norm_rope_store": clock(ops.qk_norm_rope_store, qkv, slots, cos_sin, norm, norm, 1e-6, kv, slots),
        }
        yield f"{tokens} tokens: " + ", ".join(f"{name} {best * 1e6:.1f} us" for name, best in seconds.items())


def bench_sample(clock: Clock) -> Iterator[str]:
    for rows in (1, 32):
        logits = 3 * torch.randn(rows, VOCAB)
        seed = torch.arange(rows)
        for name, params in (
            ("greedy", GREEDY),
            ("temperature 1", SamplingParams()),
            ("top_k 20", SamplingParams(temperature=0.7, top_k=20)),
            ("top_p 0.95", SamplingParams(temperature=0.7, top_p=0.95)),
            ("top_k 20, top_p 0.8, min_p 0.05", SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05)),
        ):
            seconds = clock(ops.sample, logits, sampling_metadata([params] * rows), seed, seed)
            yield f"sample {rows} x {VOCAB}, {name}: {seconds * 1e3:.3f} ms"
        yield f"torch.argmax {rows} x {VOCAB}: {clock(torch.argmax, logits, -1) * 1e3:.3f} ms"


SECTIONS: dict[str, Callable[[Clock], Iterator[str]]] = {
    "linear": bench_linear,
    "quantized": bench_quantized,
    "tiles": bench_tiles,
    "decode": bench_decode,
    "prefill": bench_prefill,
    "rows": bench_rows,
    "sample": bench_sample,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="least time to spend on each number")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = Clock(arguments.seconds)
    print(f"{machine()}. {arguments.threads} threads.")
    print(memory_bandwidth(clock))
    for name in arguments.only.split(","):
        for line in SECTIONS[name](clock):
            print(line, flush=True)


if __name__ == "__main__":
    main()
