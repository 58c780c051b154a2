"""Defines each kernel of `ops` in plain torch, with the same signature, and the weights that they read. Runs on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from starling_engine.model_config.layer import Temperature
from starling_engine.model_config.moe import ClampedSwiglu, ExpertGate, TanhGelu
from starling_engine.native.cache_rows import cached, columns, uncached
from starling_engine.native.sampling_metadata import SamplingMetadata
from starling_engine.rng import gumbel


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight [n, k] bf16. If gated, the first half of its rows is the gate, the second half is `up`.

    `data` is [ceil(n / 16), k / 2, 16, 2] where the kernels pack it (zeros past n), and [n, k] in the reference. So only the module
    that packed a weight can use it.
    """

    data: Tensor
    n: int
    k: int
    gated: bool = False

    @property
    def width(self) -> int:
        """Columns of the output of `linear`."""
        return self.n // 2 if self.gated else self.n


@dataclass(frozen=True, slots=True)
class PackedExperts(PackedWeight):
    """Weights [n, k] of several experts, which are the first dimension of `data`."""

    def expert(self, index: int) -> PackedWeight:
        """Returns the weight of one expert, in the same memory."""
        return PackedWeight(self.data[index], self.n, self.k, self.gated)


def pack_linear(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    """Keeps the weight [N, K] as it is."""
    n, k = weight.shape
    return PackedWeight(weight, n, k, gated)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiplies x [M, K] by the weight, plus bias [N], in fp32 -> [M, N] of `out_dtype`; gated, then applies `silu_mul`."""
    return _opened(F.linear(x.float(), packed.data.float(), None if bias is None else bias.float()), packed, None).to(out_dtype)


def _opened(sums: Tensor, packed: PackedWeight, gate: ExpertGate | None) -> Tensor:
    return expert_gate(sums, gate) if packed.gated else sums


def empty_experts(experts: int, n: int, k: int, *, gated: bool = False) -> PackedExperts:
    """Allocates the weights [n, k] of `experts` experts."""
    return PackedExperts(torch.empty(experts, n, k, dtype=torch.bfloat16), n, k, gated)


def pack_expert(weight: Tensor, experts: PackedExperts, index: int) -> None:
    """Keeps the weight [N, K] of one expert as it is."""
    experts.data[index] = weight


def grouped_linear(
    x: Tensor,
    tokens: Tensor,
    starts: Tensor,
    experts: PackedExperts,
    biases: Tensor | None = None,
    gate: ExpertGate | None = None,
) -> Tensor:
    """Applies the matrix of each pair's expert to x[token]. For the arguments see `ops`."""
    pieces = x[tokens].split_with_sizes(starts.diff().tolist())
    products = [_product(piece, experts, index, biases) for index, piece in enumerate(pieces)]
    return _opened(torch.cat(products), experts, gate).to(torch.bfloat16)


def _product(x: Tensor, experts: PackedExperts, index: int, biases: Tensor | None) -> Tensor:
    return F.linear(x.float(), experts.data[index].float(), None if biases is None else biases[index].float())


def grouped_sum(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Tensor,
    experts: PackedExperts,
    num_tokens: int,
    biases: Tensor | None = None,
) -> Tensor:
    """Sums by token, in fp32, x times the weight of the expert, times `weights`. For the arguments see `ops`."""
    pieces = x.split_with_sizes(starts.diff().tolist())
    each = [_product(piece, experts, index, biases) for index, piece in enumerate(pieces)]
    out = torch.zeros(num_tokens, experts.n)
    return out.index_add_(0, tokens, torch.cat(each) * weights[:, None]).to(x.dtype)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Returns the rows ids [T] int64 of the table [N, K]: [T, K]."""
    return F.embedding(ids, table)


def embedding_packed(ids: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Copies the rows ids [T] int64 of the weight -> out [T, K]."""
    torch.index_select(packed.data, 0, ids, out=out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Normalises x [T, K] / rms(x) * weight [K] -> out. In fp32, rounded to the weight's type before it."""
    out.copy_(_normalised(x, weight, eps))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Adds residual += x, in place; then applies `rms_norm` to residual."""
    residual += x
    rms_norm(residual, weight, eps, out)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return ((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight).to(x.dtype)


def expert_gate(gate_up: Tensor, gate: ExpertGate | None) -> Tensor:
    """Applies an expert's gate, whatever it is: gate_up [T, 2 I] -> [T, I] of its type."""
    match gate:
        case ClampedSwiglu():
            return clamped_swiglu(gate_up, gate)
        case TanhGelu():
            opened, up = gate_up.chunk(2, dim=-1)
            return F.gelu(opened, approximate="tanh") * up
    return silu_mul(gate_up)


def clamped_swiglu(gate_up: Tensor, gate: ClampedSwiglu) -> Tensor:
    """Applies the gate in fp32: gate_up [T, 2 I] -> [T, I] of its type."""
    opened, up = gate_up.float().chunk(2, dim=-1)
    opened, up = opened.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return ((up + gate.offset) * opened * torch.sigmoid(gate.alpha * opened)).to(gate_up.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Multiplies silu of the first half by the second: gate_up [T, 2 I] -> [T, I]."""
    return activate_and_mul("silu", gate_up)


Opening = Literal["as it is", "sigmoid", "silu"]
"""A gate is opened so before it multiplies."""


def gate_mul(x: Tensor, gate: Tensor, opening: Opening = "as it is") -> Tensor:
    """Multiplies x [T, C] by the opened gate [T, G], each of whose columns is for C / G of x. For the arguments see `ops`."""
    parts, gates = x.view(len(x), gate.shape[1], x.shape[1] // gate.shape[1]), gate.unsqueeze(2)
    if opening == "silu":
        return F.silu(gates.expand_as(parts).to(torch.float32, copy=True), inplace=True).mul_(parts).to(x.dtype).flatten(1)
    return (parts * (gates.sigmoid() if opening == "sigmoid" else gates)).flatten(1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}
"""Activations by their names in configs."""


def activate(name: str, x: Tensor) -> Tensor:
    """Returns the activation of x. In `elementwise_ops` that is in place."""
    return ACTIVATIONS[name](x)


def activate_and_mul(name: str, gate_up: Tensor) -> Tensor:
    """Multiplies the activation of the first half by the second: gate_up [T, 2 I] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(name, gate).mul_(up)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Returns xIELU of x (arXiv 2411.13010), whose slopes on both sides are learnt. In `elementwise_ops` that is in place."""
    # softplus(p) x^2 + beta x where x > 0, else (beta + softplus(n)) (exp(min(x, eps)) - 1 - x) + beta x
    above, under = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    below = (torch.expm1(torch.minimum(x, eps)) - x).mul_(under)
    return torch.where(x > 0, above * x * x, below).add_(beta * x)


def add(to: Tensor, x: Tensor, by: float = 1.0) -> Tensor:
    """Adds by * x to `to`, in place, and returns it."""
    return to.add_(x, alpha=by)


def multiply(x: Tensor, by: float) -> Tensor:
    """Multiplies x by a number, in place, and returns it."""
    return x.mul_(by)


def multiple(x: Tensor, by: float) -> Tensor:
    """Returns by * x."""
    return x * by


def multiply_rows(x: Tensor, by: Tensor, at: Tensor | None = None, out: Tensor | None = None, *, sigmoid: bool = False) -> Tensor:
    """Multiplies rows of x by numbers, which are rounded to its type. For the arguments see `elementwise_ops`."""
    factors = by if at is None else by[at]
    factors = (factors.sigmoid() if sigmoid else factors).to(x.dtype)
    return torch.mul(x, factors[:, None], out=x if out is None else out)


def temper(x: Tensor, positions: Tensor, temperature: Temperature) -> Tensor:
    """Multiplies rows of x by the temperature of their positions, in place, and returns it."""
    steps = torch.floor((positions.float() + temperature.first) / temperature.step)
    factors = torch.log1p(steps) * temperature.scale + 1.0
    return x.mul_(factors[:, None].to(x.dtype))


def finish_logits(logits: Tensor, divisor: float, cap: float) -> Tensor:
    """Divides logits, in place, and returns them; with a cap above 0 they are cap * tanh(logit / cap) then."""
    if divisor != 1:
        logits.div_(divisor)
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


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
) -> Tensor:
    """Splits qkv [T, (H + 2 KVH) D]; keys and values go to the cache, the queries come back [T, H, D].

    For the arguments see `ops`.
    """
    kv_heads, block_size, dim = *kv.shape[2:4], columns(kv)
    q, k, v = qkv.view(len(qkv), -1, dim).split_with_sizes([qkv.shape[1] // dim - 2 * kv_heads, kv_heads, kv_heads], 1)
    q = q if q_norm is None else _normalised(q, q_norm, eps)
    k = k if k_norm is None else _normalised(k, k_norm, eps)
    turns = cos_sin[positions.long()][:, None]
    block, offset = slots.div(block_size, rounding_mode="floor"), slots % block_size
    stored = slots >= 0
    kv[block[stored], 0, :, offset[stored]] = cached(_rotated(k, turns)[stored], kv.dtype, key_scale)
    kv[block[stored], 1, :, offset[stored]] = cached(v[stored], kv.dtype, value_scale)
    return _rotated(q, turns)


def rotate_and_norm(qkv: Tensor, heads: tuple[int, int], positions: Tensor, cos_sin: Tensor, weights: Tensor, eps: float) -> None:
    """Rotates and then normalises heads of queries and keys, in place, in fp32, rounded once. For the arguments see `ops`."""
    dim, turns = weights.shape[1], cos_sin[positions][:, None]
    parts = torch.split(qkv[:, : sum(heads) * dim], [each * dim for each in heads], dim=1)
    for part, weight in zip(parts, weights, strict=True):
        rotated = _rotated(part.view(len(part), part.shape[1] // dim, dim).float(), turns)
        part.copy_(F.rms_norm(rotated, (dim,), weight, eps).flatten(1))


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotates x [T, heads, D] by turns [T, 1, rotary]. Elements past rotary stay. In fp32, rounded once."""
    rotary = turns.shape[-1]
    (low, high), (cosine, sine) = x[..., :rotary].float().chunk(2, -1), turns.chunk(2, -1)
    turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)
    return torch.cat((turned.to(x.dtype), x[..., rotary:]), -1)


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
    """Attends causally from q [T, H, D] to the paged cache -> [T, H, D]. For the arguments see `ops`.

    One sequence after another: gathers keys and values, masks scores, softmax in fp32.
    """
    out = torch.empty_like(q)
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if rows.start < rows.stop:
            keys, values = (uncached(each, torch.float32) for each in _gather(kv, block_tables[s], context))
            out[rows] = value_scale * _attend(q[rows], keys, values, scale * key_scale, window, soft_cap, sinks)
    return out


def _gather(kv: Tensor, block_table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Returns keys and values [KVH, context, row] of one sequence."""
    block_size = kv.shape[3]
    blocks = kv[block_table[: -(-context // block_size)].long()]
    both = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return both[0], both[1]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, soft_cap: float, sinks: Tensor | None) -> Tensor:
    """Attends from q [T, H, D], the last T positions, to keys and values [KVH, context, D] fp32 -> [T, H, D]."""
    tokens, heads, dim = q.shape
    kv_heads, context, _ = keys.shape
    grouped = q.float().view(tokens, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("tkgd,kcd->kgtc", grouped, keys) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(context - tokens, context, device=q.device)[:, None]
    key = torch.arange(context, device=q.device)[None, :]
    hidden = key > position
    if window > 0:
        hidden = hidden | (key <= position - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, tokens, 1)], -1)
    weights = scores.softmax(-1)[..., :context]
    # Keys before the window may lie in blocks that hold anything by now, even NaN.
    seen = values.masked_fill(hidden.all(0)[None, :, None], 0.0)
    return torch.einsum("kgtc,kcd->tkgd", weights, seen).reshape(q.shape).to(q.dtype)


def sample(logits: Tensor, metadata: SamplingMetadata[Tensor], seed: Tensor, position: Tensor) -> Tensor:
    """Samples one token [S] int64 for each row of logits [S, V] fp32: the largest logit, where the temperature is 0.

    Else it draws from the softmax of logits / temperature, among the tokens that all filters keep, ties at a threshold included:

    top_k  the top_k largest (0: all)
    top_p  of those, renormalised, the smallest set with a probability of at least top_p (1: all)
    min_p  tokens at least min_p times as likely as the likeliest (0: all)

    The draw is the largest of scaled logit + Gumbel noise (`rng`). NaN counts as +inf, so a row with NaN gives a token whose logit
    is not finite.
    """
    logits = torch.where(logits.isnan(), torch.inf, logits)
    greedy = metadata.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, metadata.temperature)[:, None]
    noisy = scaled.double() + gumbel(seed, position, logits.shape[1])
    drawn = noisy.masked_fill(~_kept(scaled, metadata), float("-inf")).argmax(-1)
    return torch.where(greedy, logits.argmax(-1), drawn)


def _kept(scaled: Tensor, metadata: SamplingMetadata[Tensor]) -> Tensor:
    """Returns which tokens [S, V] the filters keep. Each keeps those from some logit up."""
    vocab, top_k, top_p = scaled.shape[1], metadata.top_k, metadata.top_p[:, None]
    descending = scaled.sort(-1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
    kth = descending.gather(1, k[:, None] - 1)
    descending = descending.masked_fill(descending < kth, float("-inf"))
    mass = descending.double().softmax(-1).cumsum(-1)
    before = (mass < top_p.double()).sum(-1, keepdim=True).clamp(max=vocab - 1)
    pth = torch.where(top_p < 1, descending.gather(1, before), float("-inf"))
    min_p = metadata.min_p.double()[:, None]
    least = torch.where(min_p > 0, scaled.max(-1, keepdim=True).values.double() + torch.log(min_p), float("-inf"))
    return (scaled >= kth) & (scaled >= pth) & (scaled.double() >= least)


def apply_token_bitmask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Sets the logits [N, V] of forbidden tokens to -inf, in place. For the arguments see `ops`."""
    bit = 1 << torch.arange(8, dtype=torch.uint8, device=words.device)
    forbidden = (words.view(torch.uint8)[:, :, None] & bit) == 0
    # Faster on a CPU than to fill in place, which branches for each logit.
    masked = torch.where(forbidden.flatten(1)[:, : logits.shape[1]], float("-inf"), logits.index_select(0, rows))
    logits.index_copy_(0, rows, masked)


def copy_chunk(pages: Tensor, blocks: list[int], first: int, blocks_per_chunk: int, slot: Tensor, *, to_pages: bool) -> None:
    """Copies a chunk of the paged cache to a slot of host memory, or back. For the arguments see `ops`."""
    _, runs, run_bytes = pages.shape
    chunk = slot[: runs * blocks_per_chunk * run_bytes].view(runs, blocks_per_chunk, run_bytes)[:, first : first + len(blocks)]
    index = torch.tensor(blocks)
    if to_pages:
        pages[index] = chunk.transpose(0, 1)
    else:
        chunk.copy_(pages[index].transpose(0, 1))
