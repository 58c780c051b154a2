"""Several residual streams (manifold-constrained hyper-connections, DeepSeek-V4, section 2.2), in torch and fp32.

A part of a layer reads one state, a weighted sum of the streams. What it gives goes to each of them by a weight. A matrix, whose
rows and columns have sums of 1, mixes them. All weights are made of the streams themselves.
"""

import torch
from torch.nn import functional as F

from starling_engine.model_config.traits import Streams
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class _Weighing:
    """One matrix of all streams, whose products are scaled and shifted: weights of each token. `prefix` begins its names."""

    def __init__(self, build: BuildContext, prefix: str, parts: tuple[int, ...]) -> None:
        streams = build.config.traits.streams
        assert streams is not None, "this model has one residual stream"
        self.streams: Streams = streams
        self._prefix, self._parts, self._eps = prefix, list(parts), build.config.rms_eps
        width = streams.count * build.config.hidden_size
        self._matrix = torch.empty(sum(parts), width, device=build.device)
        self._bias, self._scale = torch.empty(sum(parts), device=build.device), torch.empty(len(parts), device=build.device)

    def weigh(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, streams, hidden_size] -> weights [T, part] fp32 of each part."""
        flat = x.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self._eps)
        found, biases = torch.split(F.linear(flat, self._matrix), self._parts, dim=-1), torch.split(self._bias, self._parts)
        return tuple(part * scale + bias for part, scale, bias in zip(found, self._scale, biases, strict=True))

    def one_of(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums the streams, by the sigmoid of what was weighed: x [T, streams, hidden_size] -> [T, hidden_size]."""
        shares = torch.sigmoid(weights) + self.streams.eps
        return (shares.unsqueeze(-1) * x).sum(dim=1).to(x.dtype)

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = {"fn": self._matrix, "base": self._bias, "scale": self._scale}
        return {f"{self._prefix}{name}": copy_slot(tensor) for name, tensor in parts.items()}


class StreamMixer(_Weighing):
    """Connects the streams with one part of a layer."""

    def __init__(self, build: BuildContext, prefix: str) -> None:
        streams = build.config.traits.streams
        count = 0 if streams is None else streams.count
        super().__init__(build, prefix, (count, count, count * count))

    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, streams, hidden_size] -> (the part's input [T, hidden_size], streams mixed, weights of the part's output)."""
        into, out, mixing = self.weigh(x)
        matrix = self._balanced(mixing.view(-1, self.streams.count, self.streams.count)).to(x.dtype)
        return self.one_of(x, into), matrix.transpose(1, 2) @ x, (2 * torch.sigmoid(out)).to(x.dtype)

    def _balanced(self, mixing: torch.Tensor) -> torch.Tensor:
        """Makes rows and columns of [T, streams, streams] sum to 1, columns last."""
        eps = self.streams.eps
        matrix = mixing.softmax(dim=-1) + eps
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.streams.iterations - 1):
            matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
        return matrix


class StreamHead(_Weighing):
    """Makes one state of the streams behind the last layer."""

    def __init__(self, build: BuildContext) -> None:
        streams = build.config.traits.streams
        super().__init__(build, build.names.head_streams, (0 if streams is None else streams.count,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, streams, hidden_size] -> [T, hidden_size]."""
        return self.one_of(x, *self.weigh(x))
