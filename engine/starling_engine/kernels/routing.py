"""The choice of experts in one launch: softmax or sigmoid, groups, top-k and weights of a token in one warp's registers."""

import torch
import triton
import triton.language as tl

from starling_engine.model_config.moe import Routing

LOWEST = tl.constexpr(-1e38)
"""Replaces NaN and anything lower: worse than any affinity, better than an expert that is excluded (-inf). Two do not overflow."""

TINY = tl.constexpr(1e-20)
"""Same as TINY in `layers/router.py`."""


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None, slot_mapping: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `layers.router.route` does, each token's best expert first. Experts are distinct even where logits are NaN."""
    tokens = len(logits)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits,
            logits if bias is None else bias,
            ids if slot_mapping is None else slot_mapping,
            weights,
            ids,
            logits.stride(0),
            routing.scaling,
            PADDED=slot_mapping is not None,
            **constants(routing),
        )
    return weights, ids


def constants(routing: Routing) -> dict[str, int | bool]:
    """Returns the kernel's compile-time constants; `GROUP_LANES` and `MEMBER_LANES` are the sizes of its tile."""
    limited = routing.top_groups < routing.num_groups
    groups = routing.num_groups if limited else 1
    members = routing.num_experts // groups
    return {
        "GROUPS": groups,
        "MEMBERS": members,
        "TOP_GROUPS": routing.top_groups if limited else 1,
        "TOP_K": routing.top_k,
        "SOFTMAX": routing.score == "softmax",
        "BIASED": routing.bias,
        "BEST_TWO": routing.group_score == "best two",
        "RENORMALIZE": routing.renormalize,
        "GROUP_LANES": triton.next_power_of_2(groups),
        "MEMBER_LANES": triton.next_power_of_2(members),
        "CHOICE_LANES": triton.next_power_of_2(routing.top_k),
        "num_warps": 1,
    }


@triton.jit
def _route(
    logits,
    bias,
    slot_mapping,
    weights,
    ids,
    stride,
    scaling,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    BEST_TWO: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    MEMBER_LANES: tl.constexpr,
    CHOICE_LANES: tl.constexpr,
):
    """Program (token). The experts are a tile [GROUP_LANES, MEMBER_LANES], flat, so that groups of any size start at a row."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, GROUP_LANES * MEMBER_LANES)
    group, member = lane // MEMBER_LANES, lane % MEMBER_LANES
    real = (group < GROUPS) & (member < MEMBERS)
    expert = group * MEMBERS + member
    logit = tl.load(logits + token * stride + expert, mask=real, other=float("-inf"))
    affinity = _softmax(logit) if SOFTMAX else tl.sigmoid(logit)
    wanted = affinity
    if BIASED:
        wanted += tl.load(bias + expert, mask=real, other=0.0)
    wanted = tl.where(real, tl.where(wanted > LOWEST, wanted, LOWEST), float("-inf"))
    if TOP_GROUPS < GROUPS:
        grouped = tl.reshape(wanted, [GROUP_LANES, MEMBER_LANES])
        inside = _best_groups(grouped, TOP_GROUPS, BEST_TWO, GROUP_LANES, MEMBER_LANES)
        grouped = tl.where(inside[:, None] > 0, grouped, float("-inf"))
        wanted = tl.reshape(grouped, [GROUP_LANES * MEMBER_LANES])
    choice = tl.arange(0, CHOICE_LANES)
    chosen, weight = tl.zeros([CHOICE_LANES], tl.int32), tl.zeros([CHOICE_LANES], tl.float32)
    for i in range(TOP_K):
        best = tl.argmax(wanted, 0)
        share = tl.sum(tl.where(lane == best, affinity, 0.0), 0)
        weight = tl.where(choice == i, share, weight)
        chosen = tl.where(choice == i, best // MEMBER_LANES * MEMBERS + best % MEMBER_LANES, chosen)
        wanted = tl.where(lane == best, float("-inf"), wanted)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + TINY)
    if PADDED:
        chosen = tl.where(tl.load(slot_mapping + token) < 0, -1, chosen)
    at = token * TOP_K + choice
    tl.store(weights + at, weight * scaling, mask=choice < TOP_K)
    tl.store(ids + at, chosen.to(tl.int64), mask=choice < TOP_K)


@triton.jit
def _softmax(logit):
    exponentials = tl.exp(logit - tl.max(logit, 0))
    return exponentials / tl.sum(exponentials, 0)


@triton.jit
def _best_groups(wanted, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, GROUP_LANES: tl.constexpr, MEMBER_LANES: tl.constexpr):
    """wanted [GROUP_LANES, MEMBER_LANES] -> [GROUP_LANES] int32, 1 for the groups that experts are chosen from."""
    worth = tl.max(wanted, 1)
    if BEST_TWO:
        first = tl.argmax(wanted, 1)
        others = tl.where(tl.arange(0, MEMBER_LANES)[None, :] == first[:, None], float("-inf"), wanted)
        worth += tl.max(others, 1)
    group = tl.arange(0, GROUP_LANES)
    inside = tl.zeros([GROUP_LANES], tl.int32)
    for _ in range(TOP_GROUPS):
        best = tl.argmax(worth, 0)
        inside = tl.where(group == best, 1, inside)
        worth = tl.where(group == best, float("-inf"), worth)
    return inside
