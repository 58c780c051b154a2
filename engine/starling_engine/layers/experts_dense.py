"""Experts as plain tensors and torch's own matrix products. Works for every dtype on every device."""

import torch
from torch.nn import functional as F

from starling_engine.layers.activation import silu_and_mul
from starling_engine.layers.experts import ExpertPart, ExpertsShape, group_by_expert, plain_parts


class DenseExperts:
    """All experts' gates and ups in one tensor [E, 2 I, H], their downs in another [E, H, I].

    One product after another, of the experts only that this step's tokens go to.
    """

    name = "dense"
    _gate_up: torch.Tensor | None = None
    _down: torch.Tensor | None = None

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._gate = silu_and_mul(dtype, device)
        return plain_parts(shape)

    def load_shard(self, part: ExpertPart, tensor: torch.Tensor) -> None:
        self._place(part).copy_(tensor)

    def finish(self) -> None:
        """The parts are where `apply` reads them."""

    def apply(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert self._gate_up is not None and self._down is not None, "applied before it was loaded"
        groups = group_by_expert(ids, self._shape.experts)
        starts, weights = groups.starts.tolist(), weights.flatten()[groups.order].unsqueeze(-1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in groups.starts.diff().nonzero().flatten().tolist():
            pairs = slice(starts[expert], starts[expert + 1])
            tokens = groups.tokens[pairs]
            opened = self._gate(F.linear(x[tokens], self._gate_up[expert]))
            out.index_add_(0, tokens, F.linear(opened, self._down[expert]) * weights[pairs])
        return out.to(x.dtype)

    def _place(self, part: ExpertPart) -> torch.Tensor:
        """Where the part lies. Each tensor is allocated at its first part, and its pages are taken as they are written."""
        at = part.expert - self._shape.experts.start
        experts, hidden, size = self._shape.num_experts, self._shape.hidden_size, self._shape.intermediate_size
        if part.shard == "down":
            if self._down is None:
                self._down = torch.empty(experts, hidden, size, dtype=self._dtype, device=self._device)
            return self._down[at]
        if self._gate_up is None:
            self._gate_up = torch.empty(experts, 2 * size, hidden, dtype=self._dtype, device=self._device)
        return self._gate_up[at].view(2, size, hidden)[int(part.shard == "up")]
