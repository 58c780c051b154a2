"""The native kernels on torch tensors. The function of the same name in `reference` defines the result of each.

Shapes: T tokens, K model width, H query heads, KVH key-value heads, D head dimension, S sequences. Tensors are on the CPU. Callers
guarantee shapes, types and contiguity, so these are asserted.

The file is long because each kernel's contract is written here once, whole.
"""

import math
from collections.abc import Sequence
from ctypes import c_int64
from typing import Protocol, get_args

import torch
from torch import Tensor

from starling_engine.model_config.moe import ClampedSwiglu, ExpertGate, TanhGelu
from starling_engine.native.bindings import library
from starling_engine.native.cache_rows import FP8, INT4, INT8, columns
from starling_engine.native.reference import Opening, PackedExperts, PackedWeight
from starling_engine.native.sampling_metadata import SamplingMetadata, has_rows
from starling_engine.native.weight_memory import WEIGHTS

BLOCK_COLUMNS = 16


def _is_float(tensor: Tensor) -> bool:
    """Returns whether the kernels compute on its type."""
    return tensor.dtype in (torch.float32, torch.bfloat16)


_CACHES = {FP8: 1, INT8: 2, INT4: 3}
"""Kinds of a cache by its dtype, other than that of the model."""


def _is_cache_of(tensor: Tensor, kv: Tensor) -> bool:
    """Returns whether the cache `kv` has the tensor's type, or one of `cache_rows`, and each block of it is in one piece."""
    _, _, kv_heads, block_size, row = kv.shape
    whole = kv.stride()[1:] == (kv_heads * block_size * row, block_size * row, row, 1)
    return whole and _is_float(tensor) and (kv.dtype == tensor.dtype or kv.dtype in _CACHES)


def pack_linear(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    """Packs a linear layer's weight [N, K] bf16 (K even; N a multiple of 16 where gated) for `linear` and `embedding_packed`."""
    n, k = weight.shape
    packed = PackedWeight(_empty_packed(n, k, gated), n, k, gated)
    _pack(weight, packed)
    return packed


def empty_experts(experts: int, n: int, k: int, *, gated: bool = False) -> PackedExperts:
    """Reserves memory for the weights [n, k] of `experts`, which `pack_expert` fills. The system gives it when it is written."""
    return PackedExperts(_empty_packed(n, k, gated, experts), n, k, gated)


def pack_expert(weight: Tensor, experts: PackedExperts, index: int) -> None:
    """Packs the weight [N, K] bf16 of one expert into its part of the memory."""
    _pack(weight, experts.expert(index))


def _empty_packed(n: int, k: int, gated: bool, *leading: int) -> Tensor:
    assert k % 2 == 0 and (not gated or n % BLOCK_COLUMNS == 0)
    return WEIGHTS.empty((*leading, -(-n // BLOCK_COLUMNS), k // 2, BLOCK_COLUMNS, 2), torch.bfloat16)


def _pack(weight: Tensor, to: PackedWeight) -> None:
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape == (to.n, to.k)
    library().starling_pack_linear(weight.data_ptr(), to.n, to.k, to.data.data_ptr(), to.gated, torch.get_num_threads())


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiplies x [M, K] bf16 (rows may be strided) by the weight, plus bias [N] bf16 -> [M, N] bf16 or fp32.

    A gated weight gives silu of the product's first half times the second, [M, N / 2].
    """
    m, k = x.shape
    assert x.dtype == torch.bfloat16 and k == packed.k and x.stride(1) == 1
    assert bias is None or (bias.dtype == torch.bfloat16 and bias.shape == (packed.n,) and bias.is_contiguous())
    assert out_dtype in (torch.float32, torch.bfloat16)
    out = torch.empty(m, packed.width, dtype=out_dtype)
    library().starling_linear(
        x.data_ptr(),
        x.stride(0),
        m,
        packed.data.data_ptr(),
        packed.n,
        k,
        None if bias is None else bias.data_ptr(),
        packed.gated,
        out.data_ptr(),
        out_dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def grouped_linear(
    x: Tensor,
    tokens: Tensor,
    starts: Tensor,
    experts: PackedExperts,
    biases: Tensor | None = None,
    gate: ExpertGate | None = None,
) -> Tensor:
    """Multiplies x[token] by the expert's weight, for S pairs of token and expert -> [S, N] bf16, or gated [S, N / 2].

    x [T, K] bf16 (rows may be strided); tokens [S] int64. Pairs are sorted by expert: those of e are [starts[e], starts[e + 1]), of
    starts [E + 1] int64. biases [E, N] bf16 are added; a gated weight has the `gate`, or without one SiLU times up.
    """
    assert x.dtype == torch.bfloat16 and x.shape[1] == experts.k and x.stride(1) == 1
    check_pairs(tokens, starts, experts.data)
    out = torch.empty(tokens.shape[0], experts.width, dtype=torch.bfloat16)
    library().starling_grouped_linear(
        x.data_ptr(),
        x.stride(0),
        tokens.data_ptr(),
        starts.data_ptr(),
        starts.shape[0] - 1,
        experts.data.data_ptr(),
        experts.n,
        experts.k,
        address_of(biases, experts),
        experts.gated,
        *gate_arguments(gate),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def grouped_sum(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Tensor,
    experts: PackedExperts,
    num_tokens: int,
    biases: Tensor | None = None,
) -> Tensor:
    """Sums by token each pair's x [S, K] bf16 times its expert's weight, times weights [S] fp32 -> [num_tokens, N] bf16.

    biases [E, N] bf16 are added to products before they are weighted. For the pairs see `grouped_linear`. Summed in fp32, in the
    order of the experts.
    """
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape == (tokens.shape[0], experts.k) and not experts.gated
    assert weights.dtype == torch.float32 and weights.shape == tokens.shape and weights.is_contiguous()
    check_pairs(tokens, starts, experts.data)
    out = torch.empty(num_tokens, experts.n, dtype=torch.bfloat16)
    library().starling_grouped_sum(
        x.data_ptr(),
        tokens.data_ptr(),
        weights.data_ptr(),
        starts.data_ptr(),
        starts.shape[0] - 1,
        experts.data.data_ptr(),
        experts.n,
        experts.k,
        address_of(biases, experts),
        out.data_ptr(),
        num_tokens,
        torch.get_num_threads(),
    )
    return out


def check_pairs(tokens: Tensor, starts: Tensor, experts: Tensor) -> None:
    """Checks the pairs that kernels of experts take. `experts` has one of them in each part of its first dimension."""
    assert starts.dtype == torch.int64 and starts.shape == (experts.shape[0] + 1,) and starts.is_contiguous()
    assert tokens.dtype == torch.int64 and tokens.is_contiguous()


class HasRows(Protocol):
    """Matrices [n, k] of experts, in whatever form."""

    @property
    def n(self) -> int: ...


def address_of(biases: Tensor | None, experts: HasRows) -> int | None:
    """Returns the address of all experts' biases [E, N] bf16, if there are any."""
    if biases is None:
        return None
    assert biases.dtype == torch.bfloat16 and biases.is_contiguous() and biases.shape[1] == experts.n
    return biases.data_ptr()


def gate_arguments(gate: ExpertGate | None) -> tuple[float, float, float]:
    """Returns alpha, limit and offset as kernels take them; a limit of 0 is SiLU times up, and one of -1 GELU."""
    match gate:
        case ClampedSwiglu(alpha=alpha, limit=limit, offset=offset):
            return alpha, limit, offset
        case TanhGelu():
            return 0.0, -1.0, 0.0
    return 0.0, 0.0, 0.0


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Returns the rows ids [T] int64 of the table [N, K]: [T, K]."""
    assert ids.dtype == torch.int64 and ids.is_contiguous() and table.is_contiguous()
    out = torch.empty(len(ids), table.shape[1], dtype=table.dtype)
    row_bytes = table.shape[1] * table.element_size()
    library().starling_embedding(ids.data_ptr(), len(ids), table.data_ptr(), row_bytes, out.data_ptr(), torch.get_num_threads())
    return out


def embedding_packed(ids: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Copies the rows ids [T] int64 of the weight -> out [T, K] bf16, so that tied embeddings need no second copy."""
    assert ids.dtype == torch.int64 and ids.is_contiguous() and not packed.gated
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == (ids.shape[0], packed.k)
    library().starling_embedding_packed(
        ids.data_ptr(),
        ids.shape[0],
        packed.data.data_ptr(),
        packed.k,
        out.data_ptr(),
        torch.get_num_threads(),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Normalises x [T, K] / rms(x) * weight [K] -> out [T, K], which may be x; rows of both may be strided.

    fp32 or bf16; the weight is that, or fp32.
    """
    _rms_norm(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Adds residual += x, in place; then residual / rms(residual) * weight [K] -> out [T, K], which may be x."""
    assert residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()
    _rms_norm(x, residual.data_ptr(), weight, eps, out)


def _rms_norm(x: Tensor, residual: int | None, weight: Tensor, eps: float, out: Tensor) -> None:
    tokens, k = x.shape
    assert _is_float(x) and x.dtype == out.dtype and x.shape == out.shape and weight.shape == (k,)
    assert weight.dtype in (x.dtype, torch.float32)
    assert x.stride(1) == out.stride(1) == 1 and weight.is_contiguous()
    library().starling_rms_norm(
        x.data_ptr(),
        x.stride(0),
        residual,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        out.stride(0),
        tokens,
        k,
        x.dtype is torch.float32,
        weight.dtype is torch.float32,
        torch.get_num_threads(),
    )


OPENINGS: tuple[Opening, ...] = get_args(Opening)
"""Openings have their numbers in this order in `kernels/norm.cpp`."""


def gate_mul(x: Tensor, gate: Tensor, opening: Opening = "as it is") -> Tensor:
    """Multiplies x [T, C] by the opened gate [T, G] -> [T, C]. Rows may be strided. A column of the gate is for C / G of x.

    fp32 or bf16. A sigmoid is rounded to that before it multiplies.
    """
    tokens, width = x.shape
    gates = gate.shape[1]
    assert _is_float(x) and x.dtype == gate.dtype and x.stride(1) == gate.stride(1) == 1
    assert len(gate) == tokens and width % gates == 0
    out = torch.empty(tokens, width, dtype=x.dtype)
    library().starling_gate_mul(
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        out.data_ptr(),
        tokens,
        gates,
        width,
        OPENINGS.index(opening),
        x.dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    *,
    stores: bool = True,
) -> Tensor:
    """Splits qkv [T, (H + 2 KVH) D] (rows may be strided); keys and values go to the cache, the queries come back [T, H, D].

    Queries and keys are RMS-normalised per head where q_norm, k_norm [D] are given, of qkv's type or fp32. Then they are rotated
    by their position [T] (int32 or int64), element i with i + rotary / 2. cos_sin [max_positions, rotary] fp32 has the cosines,
    then the sines. kv [num_blocks, 2, KVH, block_size, D] is written at slots [T] int64, block * block_size + offset. Its
    dimensions but the first are contiguous.

    Nothing is stored where a slot is -1. fp32 or bf16; D at most 512. A cache of float8_e4m3fn gets keys and values divided by
    their scales, clamped to its largest number. One of int8 or uint8 [num_blocks, 2, KVH, block_size, row] gets rows as
    `cache_rows` has them. Unless it `stores`, there are queries alone, [T, H D], and the cache is left as it is.
    """
    tokens, width = qkv.shape
    block_size, kv_heads = kv.shape[3], kv.shape[2] if stores else 0
    dim = columns(kv)
    heads = width // dim - 2 * kv_heads
    assert _is_cache_of(qkv, kv) and qkv.stride(1) == 1
    assert heads > 0 and width == (heads + 2 * kv_heads) * dim and dim <= 512
    assert positions.dtype in (torch.int32, torch.int64) and slots.dtype == torch.int64
    assert positions.shape == slots.shape == (tokens,) and positions.is_contiguous() and slots.is_contiguous()
    rotary = cos_sin.shape[1]
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and rotary <= dim and rotary % 2 == 0
    for norm in (q_norm, k_norm):
        assert norm is None or (norm.dtype in (qkv.dtype, torch.float32) and norm.shape == (dim,) and norm.is_contiguous())
    assert q_norm is None or k_norm is None or q_norm.dtype == k_norm.dtype
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype)
    library().starling_qk_norm_rope_store(
        qkv.data_ptr(),
        qkv.stride(0),
        tokens,
        heads,
        kv_heads,
        dim,
        positions.data_ptr(),
        positions.dtype is torch.int64,
        cos_sin.data_ptr(),
        rotary,
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        kv.data_ptr(),
        kv.stride(0),
        block_size,
        slots.data_ptr(),
        q.data_ptr(),
        1 / key_scale,
        1 / value_scale,
        qkv.dtype is torch.float32,
        _CACHES.get(kv.dtype, 0),
        any(norm is not None and norm.dtype is torch.float32 for norm in (q_norm, k_norm)),
        torch.get_num_threads(),
    )
    return q


def rotate_and_norm(qkv: Tensor, heads: tuple[int, int], positions: Tensor, cos_sin: Tensor, weights: Tensor, eps: float) -> None:
    """Rotates the first columns of qkv [T, (H + 2 KVH) D] (rows may be strided), in place, and then RMS-normalises each head.

    `heads` are H and KVH, of queries and of keys; weights [2, D] fp32 are of both. Whole heads are rotated: cos_sin
    [max_positions, D] is as in `qk_norm_rope_store`, positions [T] int64. bf16 or fp32, rounded once; D at most 512.
    """
    tokens, dim = len(qkv), weights.shape[1]
    assert _is_float(qkv) and qkv.stride(1) == 1 and qkv.shape[1] >= sum(heads) * dim and dim <= 512 and dim % 2 == 0
    assert positions.dtype == torch.int64 and positions.shape == (tokens,) and positions.is_contiguous()
    assert cos_sin.dtype == weights.dtype == torch.float32 and cos_sin.shape[1] == dim
    assert cos_sin.is_contiguous() and weights.is_contiguous() and len(weights) == 2
    library().starling_rotate_and_norm(
        qkv.data_ptr(),
        qkv.stride(0),
        tokens,
        *heads,
        dim,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        weights.data_ptr(),
        eps,
        qkv.dtype is torch.float32,
        torch.get_num_threads(),
    )


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends causally from q [T, H, D] to the paged cache -> [T, H, D]; D a multiple of 16, at most 512.

    kv [num_blocks, 2, KVH, block_size, D] holds this step's keys already. Its dimensions but the first are contiguous. It has q's
    type, fp32 or bf16, or one of `cache_rows`; keys and values of float8_e4m3fn are multiplied by their scales (1 for other
    types). Sequence s has q's rows [query_start[s], query_start[s + 1]), the last of its context_lens[s] tokens. All indices are
    int32, block_tables [S, max_blocks]. With a window, a token sees itself and the window - 1 before it; blocks before the window
    are not read. soft_cap turns scores into soft_cap * tanh(score / soft_cap). sinks [H] fp32 are one more score for each query of
    a head, without a value: they take part in the softmax's denominator alone.
    """
    _, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = kv.shape
    sequences, max_blocks = block_tables.shape
    assert _is_cache_of(q, kv)
    assert q.is_contiguous() and columns(kv) == dim
    assert dim % 16 == 0 and dim <= 512 and heads % kv_heads == 0 and block_size % 8 == 0
    assert block_tables.dtype == query_start.dtype == context_lens.dtype == torch.int32
    assert block_tables.is_contiguous() and query_start.is_contiguous() and context_lens.is_contiguous()
    assert query_start.shape == (sequences + 1,) and context_lens.shape == (sequences,)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous())
    out = torch.empty_like(q)
    library().starling_paged_attention(
        q.data_ptr(),
        kv.data_ptr(),
        kv.stride(0),
        block_tables.data_ptr(),
        max_blocks,
        query_start.data_ptr(),
        context_lens.data_ptr(),
        sequences,
        heads,
        kv_heads,
        dim,
        block_size,
        scale,
        window,
        soft_cap,
        key_scale,
        value_scale,
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        q.dtype is torch.float32,
        _CACHES.get(kv.dtype, 0),
        torch.get_num_threads(),
    )
    return out


def sample(logits: Tensor, metadata: SamplingMetadata[Tensor], seed: Tensor, position: Tensor) -> Tensor:
    """Samples one token [S] int64 for each row of logits [S, V] fp32; `reference.sample` defines the filters.

    seed, position [S] int64: the same draw the same noise, on every device.
    """
    rows = len(logits)
    assert has_rows(metadata, rows)
    assert seed.dtype == torch.int64 and seed.shape == (rows,) and seed.is_contiguous()
    return _sample(logits, metadata.map(Tensor.data_ptr), seed.data_ptr(), None, position, None)


def sample_slots(
    logits: Tensor, metadata: SamplingMetadata[int], seed: int, slots: Tensor, position: Tensor, chosen: Tensor
) -> Tensor:
    """Samples as `sample` does, for sequences in `slots` [S] int64 of a batch, whose arrays' addresses `metadata` and `seed` are.

    chosen [S] fp32 gets the logits of the tokens.
    """
    assert slots.dtype == torch.int64 and slots.shape == (len(logits),) and slots.is_contiguous()
    assert chosen.dtype == torch.float32 and chosen.shape == (len(logits),) and chosen.is_contiguous()
    return _sample(logits, metadata, seed, slots.data_ptr(), position, chosen.data_ptr())


def _sample(
    logits: Tensor, metadata: SamplingMetadata[int], seed: int, slots: int | None, position: Tensor, chosen: int | None
) -> Tensor:
    """Calls the kernel, by addresses."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert position.dtype == torch.int64 and position.shape == (rows,) and position.is_contiguous()
    token = torch.empty(rows, dtype=torch.int64)
    threads = torch.get_num_threads()
    library().starling_sample(
        logits.data_ptr(), rows, vocab, *metadata, seed, slots, position.data_ptr(), token.data_ptr(), chosen, threads
    )
    return token


def apply_token_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Sets the logits [N, V] fp32 (rows may be strided) of forbidden tokens to -inf, in place.

    words [M, W] int32 are masks of the rows [M] int64, which are distinct. Bit t % 32 of word t // 32 is set if token t is allowed.
    """
    vocab = logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert rows.dtype == torch.int64 and rows.is_contiguous()
    assert words.dtype == torch.int32 and words.is_contiguous() and len(words) == len(rows) and words.shape[1] * 32 >= vocab
    library().starling_apply_token_bitmask(
        logits.data_ptr(),
        logits.stride(0),
        vocab,
        rows.data_ptr(),
        len(rows),
        words.data_ptr(),
        words.shape[1],
        torch.get_num_threads(),
    )


def exchange_bytes(count: int, slot_bytes: int) -> int:
    """Returns the bytes of zeroed memory that `count` ranks must share for `exchange`."""
    size: int = library().starling_exchange_bytes(count, slot_bytes)
    return size


def exchange(area: int, rank: int, count: int, slot_bytes: int, x: Tensor, out: Tensor | None, seconds: float) -> int | None:
    """Gathers x of each of `count` ranks -> out [count, ...] of x's dtype. Without `out` it sums x in place, in fp32.

    `area` is the address of the shared memory. Every rank makes the same calls, and has the same result. Returns a rank that did
    not come within `seconds`, if there is one.
    """
    assert x.is_contiguous() and slot_bytes % 64 == 0
    if out is None:
        assert x.dtype == torch.float32
    else:
        assert out.is_contiguous() and out.dtype == x.dtype and out.shape == (count, *x.shape)
    target = None if out is None else out.data_ptr()
    lost: int = library().starling_exchange(area, rank, count, slot_bytes, x.data_ptr(), x.nbytes, target, seconds)
    return _missing(lost)


def exchange_parts(
    area: int,
    rank: int,
    slot_bytes: int,
    x: Tensor,
    sent: Sequence[int],
    out: Tensor,
    received: Sequence[int],
    seconds: float,
) -> int | None:
    """Sends rows of x [N, ...] to each rank: sent[0] to rank 0, the next sent[1] to rank 1.

    out [M, ...] gets received[r] rows of each rank r, in order. Every rank makes the same call, with rows of the same size.
    Otherwise as `exchange`.
    """
    count, row = len(sent), x.itemsize * math.prod(x.shape[1:])
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype and x.shape[1:] == out.shape[1:]
    assert len(x) == sum(sent) and len(out) == sum(received) and len(received) == count
    assert slot_bytes % 64 == 0 and slot_bytes > 16 * count
    sizes = c_int64 * count
    lost: int = library().starling_exchange_parts(
        area,
        rank,
        count,
        slot_bytes,
        x.data_ptr(),
        sizes(*(n * row for n in sent)),
        out.data_ptr(),
        sizes(*(n * row for n in received)),
        seconds,
    )
    assert lost >= ALL_CAME, "a rank sends another number of rows than this one expects"
    return _missing(lost)


ALL_CAME = -1


def _missing(lost: int) -> int | None:
    return None if lost == ALL_CAME else lost


def copy_chunk(pages: Tensor, blocks: list[int], first: int, blocks_per_chunk: int, slot: Tensor, *, to_pages: bool) -> None:
    """Copies a chunk of the paged cache to a slot of host memory, or back. Other threads run meanwhile.

    pages are uint8 [num_blocks, runs, run_bytes], contiguous but for the first dimension; `blocks` are those of the chunk from
    number `first` on. slot is uint8, [runs, blocks_per_chunk, run_bytes] flat, and may be longer.
    """
    _, runs, run_bytes = pages.shape
    assert pages.stride()[1:] == (run_bytes, 1) and first + len(blocks) <= blocks_per_chunk
    assert len(slot) >= runs * blocks_per_chunk * run_bytes
    numbers = (c_int64 * len(blocks))(*blocks)
    library().starling_copy_chunk(
        pages.data_ptr(),
        pages.stride(0),
        runs,
        run_bytes,
        numbers,
        len(blocks),
        first,
        blocks_per_chunk,
        slot.data_ptr(),
        to_pages,
    )
