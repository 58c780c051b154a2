"""Disentangled attention (DeBERTa, arXiv 2006.03654, section 3.1): queries and keys are compared with embeddings of distances."""

import math
from collections.abc import Callable

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.model_config.traits import DistanceEmbeddings
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class DistanceTable:
    """The embeddings of distances, which all layers share. Every rank has them whole."""

    def __init__(self, build: BuildContext, distances: DistanceEmbeddings) -> None:
        names, size = build.names, build.config.hidden_size
        self._distances = distances
        self._name = names.distances
        self._table = torch.empty(2 * distances.span, size, dtype=build.dtype, device=build.device)
        self._norm = build.norm(names.distances_norm) if distances.normed else None
        self._longest = build.config.max_position
        self._whole: torch.Tensor | None = None

    @property
    def embeddings(self) -> torch.Tensor:
        """Rows by distance [2 * span, hidden_size], normed where they are."""
        return self._table if self._norm is None else self._norm.forward(self._table.clone(), None)[0]

    def rows(self, length: int) -> torch.Tensor:
        """Returns the row of each query's distance to each key, [length, length] int64: a corner of the longest sequence's."""
        if self._whole is None or len(self._whole) < length:
            at = torch.arange(min(self._longest, max(length, 256)), device=self._table.device)
            rows = self._bucket(at[:, None] - at[None, :]) + self._distances.span
            self._whole = rows.clamp(0, 2 * self._distances.span - 1)
        return self._whole[:length, :length]

    def weight_slots(self) -> dict[str, WeightSlot]:
        norm = {} if self._norm is None else self._norm.weight_slots()
        return {f"{self._name}.weight": copy_slot(self._table), **norm}

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        """Returns each distance, or its bucket: half of them are for a distance each, the others grow with the logarithm."""
        if not self._distances.buckets:
            return distance
        exact = self._distances.span // 2
        distant = distance.abs().clamp(min=exact - 1)
        ratio = torch.log(distant / exact) / math.log((self._distances.longest - 1) / exact)
        logarithmic = (torch.ceil(ratio * (exact - 1)) + exact).long()
        return torch.where(distant <= exact, distance, logarithmic * distance.sign())


class DisentangledBias:
    """Adds to a layer's scores products of queries with keys of distances, and of keys with queries of distances.

    `project` makes queries, keys and values of hidden states, of embeddings of distances, too.
    """

    def __init__(self, table: DistanceTable, project: Callable[[torch.Tensor], torch.Tensor], head_dim: int, scale: float) -> None:
        self._table, self._project, self._head_dim, self._scale = table, project, head_dim, scale

    def __call__(self, q: torch.Tensor, k: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """q [M, H, D], k [N, H, D] of one sequence, of whose M tokens the first N are seen -> [H, M, N]."""
        queries, keys = meta.once(self, self._projected)
        rows = self._table.rows(len(q))[:, : len(k)].expand(q.shape[1], -1, -1)
        of_queries = (q.transpose(0, 1) @ keys).gather(2, rows)
        of_keys = (k.transpose(0, 1) @ queries).gather(2, rows.mT).mT
        return (of_queries + of_keys).mul_(self._scale)

    def _projected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries and keys of all distances, both [H, D, 2 * span]."""
        queries, keys, _ = self._project(self._table.embeddings).chunk(3, dim=1)
        return self._of_heads(queries), self._of_heads(keys)

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1, self._head_dim).permute(1, 2, 0).contiguous()
