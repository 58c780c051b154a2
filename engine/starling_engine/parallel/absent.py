"""Ranks that are not there, for a rank that only looks at the shapes of its steps."""

from collections.abc import Sequence

import torch

from starling_engine.config import WorkerConfig
from starling_engine.parallel.communicator import ALONE, Communicator, PendingTensor
from starling_engine.parallel.ranks import RankCommunicators
from starling_engine.topology.shard import Shard


class AbsentRanks:
    """Gives results of the right shapes; see `Communicator`."""

    capturable = True

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

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
    """Returns the communicators of `join_ranks`, without the others."""
    layout = config.layout
    at = layout.coordinates(config.rank)

    def ranks(index: int, count: int) -> Communicator:
        return AbsentRanks(Shard(index, count)) if count > 1 else ALONE

    return RankCommunicators(tensor=ranks(at.tp, layout.tensor), pipeline=ranks(at.pp, layout.pipeline))
