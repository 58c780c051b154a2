"""Layers whose memory of a sequence is a state of fixed size: what their kernels do, and the choice of those for a device."""

import math
from typing import Protocol

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import StateRows
from starling_engine.layers import recurrent_torch
from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.native import recurrent_ops


class RecurrentKernels(Protocol):
    """A module of kernels. `recurrent_torch` defines what they compute.

    T tokens of the step, S sequences, C channels, K taps, Hk key heads, Hv value heads (a multiple), Dk and Dv their dimensions.
    Inputs are bf16, fp16 or fp32, all of a call's of one dtype, and so is the result. Their rows, one a token, may be strided.
    Weights and states are fp32, and so is all that is computed between the two.

    A call reads each sequence's state from the blocks of meta.block_tables, runs the step's tokens, and writes the state back. A
    sequence without a token before the step begins with zeros, whatever its blocks hold. Sequences whose first token has no slot
    only fill the step up: their state is left alone, and their rows of the result are any numbers. Where the state takes in some of
    a sequence's tokens only, or none (`AttentionMetadata.taken`), rows of tokens that are not computed are any numbers, too.
    """

    def short_convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: StateRows,
        meta: AttentionMetadata,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """Adds up each channel's last K inputs x [T, C], weighted by `weight` [K, C], plus bias [C] -> [T, C].

        Both weight and state have the oldest input first. The state is K - 1 rows of shape (C,): a sequence's last inputs.
        With `silu` that follows.
        """
        ...

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state: StateRows,
        meta: AttentionMetadata,
        *,
        rate_scale: float = 1.0,
    ) -> torch.Tensor:
        """Runs the gated delta rule (arXiv 2412.06464, eq. 10) on q, k [T, Hk, Dk] and v [T, Hv, Dv] -> [T, Hv, Dv].

        a, b [T, Hv] and a_log, dt_bias [Hv] make a token's gates: the state decays by exp(-exp(a_log) * softplus(a + dt_bias)),
        and sigmoid(b), rounded to b's dtype, by `rate_scale` is the rate of learning. q and k are normalised here, to length 1.
        With a [T, Hv, Dk] and dt_bias [Hv, Dk] each row of a head's state has a decay of its own. That is Kimi Delta Attention
        (arXiv 2510.26692).

        The state is Hv rows of shape (Dk, Dv). Value head h has the queries and keys of key head h // (Hv // Hk).
        """
        ...

    def ssd_scan(
        self,
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        dt: torch.Tensor,
        a_log: torch.Tensor,
        skip: torch.Tensor,
        dt_bias: torch.Tensor,
        state: StateRows,
        meta: AttentionMetadata,
        *,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> torch.Tensor:
        """Runs the scan of Mamba-2 (arXiv 2405.21060, section 5) on x [T, H, P] and b, c [T, G, N] -> [T, H, P].

        dt [T, H] and a_log, skip, dt_bias [H] are of heads. A token's step size s is softplus(dt + dt_bias) within `dt_limits`. The
        state decays by exp(-exp(a_log) * s), and gets b's outer product with s * x; c reads the result, and skip * x is added.

        The state is H rows of shape (N, P). Head h has b and c of group h // (H // G).
        """
        ...

    def selective_scan(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        rates: torch.Tensor,
        skip: torch.Tensor,
        dt_bias: torch.Tensor,
        state: StateRows,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Runs the scan of Mamba (arXiv 2312.00752, section 3.2) on x, gate, dt [T, C] and b, c [T, N] -> [T, C].

        rates [N, C] and skip, dt_bias [C] are of channels. A token's step size s is softplus(dt + dt_bias). The state decays by
        exp(-rates * s), and gets b's outer product with s * x; c reads the result, skip * x is added, and silu of the gate
        multiplies that.

        The state is N rows of shape (C,).
        """
        ...

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        gate_first: bool = False,
        sigmoid: bool = False,
    ) -> torch.Tensor:
        """Multiplies x / rms(x) by the weight, and by silu of the gate: x, gate [T, H, D] -> [T, H, D].

        The weight is [D] or [H, D], of fp32 or x's dtype. The result is rounded to x's dtype before the weight, and to the weight's
        after it. With `gate_first` the gate multiplies x before it is normalised. With `sigmoid` that of the gate is in place of
        silu, and nothing is rounded before the end; not both.
        """
        ...


def recurrent_kernels(dtype: torch.dtype, device: torch.device) -> RecurrentKernels:
    """Returns the kernels for inputs of a dtype on a device."""
    match elementwise_kernels(dtype, device):
        case "triton":
            from starling_engine.kernels import recurrent

            return recurrent
        case "native":
            return recurrent_ops
    return recurrent_torch
