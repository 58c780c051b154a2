"""The router: chooses the experts that each token goes to."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from starling_engine import native
from starling_engine.errors import WeightError
from starling_engine.layers.elementwise import Arithmetic
from starling_engine.layers.linear import Linear
from starling_engine.layers.norm import RMSNorm
from starling_engine.model_config.moe import Routing
from starling_engine.native import routing_ops
from starling_engine.platforms.triton_support import why_not_triton
from starling_engine.weights.weight_slot import Alias, WeightSlot, copy_slot

Route = Callable[[torch.Tensor, Routing, torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""`route`, or a kernel that does the same."""

KERNEL_SCORES = ("softmax", "sigmoid")
"""Scores that kernels have."""

TINY = 1e-20
"""Avoids division by zero where all affinities are zero. Too small to change any other sum."""

logger = logging.getLogger("starling.layers")


def select_route(device: torch.device, score: str) -> Route:
    """Returns Triton's kernel where it runs, else the native one on a CPU, or torch's. Logs the choice and its reason once."""
    if score not in KERNEL_SCORES:
        _log("torch", f"kernels have no {score}")
        return route
    reason = why_not_triton(device)
    if reason is None:
        from starling_engine.kernels import routing

        _log("triton", "one launch")
        return routing.route
    if device.type == "cpu" and native.load() is not None:
        _log("native", "one call")
        return routing_ops.route
    _log("torch", reason)
    return route


@functools.cache
def _log(name: str, reason: str) -> None:
    """Logs once, and not for each layer."""
    logger.info("routing: %s (%s)", name, reason)


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts: logits [T, num_experts] fp32 -> (weights [T, top_k] fp32, ids [T, top_k] int64).

    `bias` [num_experts] fp32 where the routing has one. A token's experts are distinct and in no particular order. They are -1 for
    a token whose entry of `slot_mapping` [T] is negative: padding. With `ids` they are chosen already, and weighed alone.
    """
    affinities = _affinities(logits, routing)
    if ids is None:
        wanted = affinities if bias is None else affinities + bias
        if routing.top_groups < routing.num_groups:
            wanted = _within_groups(wanted, routing)
        ids = wanted.topk(routing.top_k, dim=-1).indices
    weights = affinities.gather(-1, ids)
    if slot_mapping is not None:
        ids = ids.masked_fill(slot_mapping[:, None] < 0, -1)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return (weights if routing.scaling == 1 else weights * routing.scaling), ids


def _affinities(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    match routing.score:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
    return F.softplus(logits).sqrt_()


def _within_groups(wanted: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Sets `wanted` [T, num_experts] to -inf for experts that are not in the `top_groups` best groups of a token."""
    grouped = wanted.view(-1, routing.num_groups, routing.group_size)
    worth = grouped.amax(-1) if routing.group_score == "best" else grouped.topk(2, dim=-1).values.sum(-1)
    excluded = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(routing.top_groups, dim=-1).indices, False)
    return grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)


class Router:
    """The router's matrix [num_experts, hidden_size], and the bias of its choice where the routing has one.

    `fused` and `fused_bias` are their names in checkpoints that hold all experts in one tensor.
    With `bias_is_row` the bias is [1, num_experts] in a checkpoint. A `table` of that name, [vocabulary, top_k], has each token's
    experts, in place of a bias; it is as long as `vocabulary`. With a `norm` x is normed first. `scales` is the name of a tensor
    [num_experts] that multiplies the weights of those that are chosen.
    """

    def __init__(
        self,
        linear: Linear,
        routing: Routing,
        bias_name: str,
        fused: str,
        fused_bias: str,
        device: torch.device,
        arithmetic: Arithmetic,
        *,
        bias_is_row: bool = False,
        table: str = "",
        vocabulary: int = 0,
        norm: RMSNorm | None = None,
        scales: str = "",
    ) -> None:
        self._linear = linear
        self._routing = routing
        self._route = select_route(device, routing.score)
        self._bias_name = bias_name
        self._bias_is_row = bias_is_row
        self._fused = fused
        self._fused_bias = fused_bias
        self._table_name = table
        self._table = torch.empty(vocabulary, routing.top_k, dtype=torch.int64, device=device) if table else None
        self._norm = norm
        self._arithmetic = arithmetic
        self._scales_name = scales
        self._scales = torch.empty(routing.num_experts, dtype=torch.float32, device=device) if scales else None
        has_bias = routing.bias and not table
        self._bias = torch.empty(routing.num_experts, dtype=torch.float32, device=device) if has_bias else None

    def forward(
        self, x: torch.Tensor, slot_mapping: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] -> (weights, ids), see `route`. `token_ids` [T] are for a router with a table."""
        if self._norm is not None:
            x = self._norm.forward(x, None)[0]
        if self._table is not None:
            assert token_ids is not None, "a table is of token ids"
            return route(self._linear.forward(x, torch.float32), self._routing, None, slot_mapping, self._table[token_ids])
        weights, ids = self._route(self._linear.forward(x, torch.float32), self._routing, self._bias, slot_mapping)
        if self._scales is not None:
            self._arithmetic.multiply_rows(weights.view(-1, 1), self._scales, ids.flatten())
        return weights, ids

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = {
            name: replace(slot, alias=Alias((f"{self._fused}.{name.rpartition('.')[2]}",), slot.shape))
            for name, slot in self._linear.weight_slots().items()
        }
        if self._bias is not None:
            slot = copy_slot(self._bias[None] if self._bias_is_row else self._bias)
            slots[self._bias_name] = replace(slot, alias=Alias((self._fused_bias,), slot.shape))
        if self._norm is not None:
            slots |= self._norm.weight_slots()
        if self._scales is not None:
            slots[self._scales_name] = copy_slot(self._scales)
        if self._table is not None:
            slots[self._table_name] = replace(copy_slot(self._table), load=self._load_table)
        return slots

    def _load_table(self, table: torch.Tensor) -> None:
        """Copies it. Raises WeightError where it names experts that are not there."""
        assert self._table is not None, "only a table is loaded so"
        last = self._routing.num_experts - 1
        if bool((table < 0).any()) or bool((table > last).any()):
            raise WeightError(f"checkpoint: {self._table_name} must name experts from 0 to {last}")
        self._table.copy_(table)
