"""The kernels that choose experts, and sort pairs of token and expert for `ops.grouped_linear` and `ops.grouped_sum`.

Routers and encoders share the product by a weight in fp32.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from starling_engine.model_config.moe import Routing
from starling_engine.native.bindings import library
from starling_engine.native.ops import BLOCK_COLUMNS
from starling_engine.native.weight_memory import WEIGHTS


def pack_exact(weight: Tensor) -> Tensor:
    """Packs a weight [N, K] fp32 for `exact_linear`, in blocks of 16 rows: [ceil(N / 16), K, 16]."""
    n, k = weight.shape
    blocks = -(-n // BLOCK_COLUMNS)
    rows = F.pad(weight, (0, 0, 0, blocks * BLOCK_COLUMNS - n))
    return WEIGHTS.empty((blocks, k, BLOCK_COLUMNS), torch.float32).copy_(rows.view(blocks, BLOCK_COLUMNS, k).transpose(1, 2))


def exact_linear(x: Tensor, packed: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] bf16 or fp32 by the packed weight of N rows, plus bias [N] -> [M, N], in fp32. Rows may be strided."""
    m, k = x.shape
    assert x.dtype in (torch.bfloat16, torch.float32) and x.stride(1) == 1
    assert packed.shape[1] == k and packed.dtype == torch.float32
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == (n,) and bias.is_contiguous())
    out = torch.empty(m, n, dtype=torch.float32)
    kernel = library().starling_fp32_linear if x.dtype == torch.float32 else library().starling_exact_linear
    kernel(
        x.data_ptr(),
        x.stride(0),
        m,
        packed.data_ptr(),
        n,
        k,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, slot_mapping: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Does what `layers.router.route` does, each token's best expert first. Experts are distinct even where logits are NaN."""
    tokens, experts = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and experts == routing.num_experts
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == (experts,) and bias.is_contiguous())
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32)
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int64)
    library().starling_route(
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        tokens,
        experts,
        routing.top_k,
        routing.num_groups,
        routing.top_groups,
        routing.score == "softmax",
        routing.group_score == "best two",
        routing.renormalize,
        routing.scaling,
        weights.data_ptr(),
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return weights, ids if slot_mapping is None else ids.masked_fill(slot_mapping[:, None] < 0, -1)


def look_up(table: Tensor, ids: Tensor) -> Tensor:
    """Returns table[ids], both int64; -1 is the last."""
    assert table.dtype == ids.dtype == torch.int64 and table.is_contiguous() and ids.is_contiguous()
    out = torch.empty(ids.shape, dtype=torch.int64)
    library().starling_look_up(table.data_ptr(), table.numel(), ids.data_ptr(), ids.numel(), out.data_ptr())
    return out


def group_by_slot(slots: Tensor, weights: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts pairs of token and slot by slot: slots [T, top_k] int64, weights [T, top_k] fp32.

    Gives starts [num_slots + 1], and the pairs' tokens and weights [T top_k], as `ops.grouped_linear` takes them.
    Those of `num_slots` are left out, and what is behind the last start means nothing.
    """
    assert slots.dtype == torch.int64 and slots.is_contiguous() and weights.shape == slots.shape
    assert weights.dtype == torch.float32 and weights.is_contiguous()
    starts = torch.empty(num_slots + 1, dtype=torch.int64)
    tokens, by_pair = torch.empty(slots.numel(), dtype=torch.int64), torch.empty(slots.numel(), dtype=torch.float32)
    library().starling_group_by_slot(
        slots.data_ptr(),
        weights.data_ptr(),
        *slots.shape,
        num_slots,
        starts.data_ptr(),
        tokens.data_ptr(),
        by_pair.data_ptr(),
    )
    return starts, tokens, by_pair
