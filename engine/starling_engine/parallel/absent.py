"""Ranks that are not there, for a rank that only looks at the shapes of its steps."""

from collections.abc import Sequence

import torch

from starling_engine.config import WorkerConfig
from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.parallel.communicator import ALONE, Communicator, PendingTensor
from starling_engine.parallel.peer_sums import MAX_RANKS, PeerSums
from starling_engine.parallel.ranks import RankCommunicators
from starling_engine.topology.shard import Shard


class AbsentRanks:
    """Gives results of the right shapes; see `Communicator`. Launches the kernels of ranks that have `peer_sums`."""

    capturable = True

    def __init__(self, shard: Shard, peer_sums: PeerSums | None = None) -> None:
        self.shard = shard
        self._peer_sums = peer_sums

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._peer_sums is None or not self._peer_sums.takes(x) else self._peer_sums.all_reduce(x)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RowNorm, rounding: RowRounding | None
    ) -> torch.Tensor | RoundedRows | None:
        if self._peer_sums is None or not self._peer_sums.takes_norm(x):
            return None
        return self._peer_sums.add_norm(x, residual, norm, rounding)

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns what a GPU's ranks do: others do not look at shapes alone."""
        return dtype

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.shard.count, *x.shape).contiguous()

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        assert len(x) == sum(sent)
        return lambda: x.new_empty(sum(received), *x.shape[1:])

    def send(self, x: torch.Tensor, to: int) -> None:
        """Does nothing."""

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:  # noqa: ARG002 - nothing comes
        return x

    def tick(self) -> None:
        """Does nothing: nobody is waited for."""


def absent_ranks(config: WorkerConfig) -> RankCommunicators:
    """Returns the communicators of `join_ranks`, without the others. Ranks of one machine are said to reach each other's memory."""
    layout = config.layout
    at = layout.coordinates(config.rank)

    def ranks(index: int, count: int, *, sums: bool) -> Communicator:
        if count == 1:
            return ALONE
        reach = sums and count <= min(MAX_RANKS, config.local_ranks)
        return AbsentRanks(
            Shard(index, count), PeerSums(torch.empty(count, dtype=torch.int64, device="meta"), index) if reach else None
        )

    return RankCommunicators(tensor=ranks(at.tp, layout.tensor, sums=True), pipeline=ranks(at.pp, layout.pipeline, sums=False))
