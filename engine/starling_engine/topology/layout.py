"""The ranks of a group: layout, coordinates, membership, and each node's part of them. Pure: no torch, no processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's coordinates; dp is outermost, tp innermost."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The number of ways that each dimension splits a model. EP spans data * tensor inside one pipeline stage."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor

    def samples(self, rank: int) -> bool:
        """Returns whether a step's results come from this rank: the first of the last stage."""
        return self.in_last_stage(rank) and self.coordinates(rank).tp == 0

    def in_last_stage(self, rank: int) -> bool:
        """Returns whether the rank is in the stage that samples: all of its ranks do, each by itself."""
        return self.coordinates(rank).pp == self.pipeline - 1

    def depth(self, *, asynchronous: bool) -> int:
        """Returns the steps that may be in flight at once: one for each stage, and one more that is planned meanwhile."""
        return self.pipeline + (1 if asynchronous else 0)

    def coordinates(self, rank: int) -> Coordinates:
        """Returns a rank's coordinates. Raises IndexError for a rank outside the layout."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a layout of {self.world_size} ranks")
        return Coordinates(dp=rank // (self.pipeline * self.tensor), pp=rank // self.tensor % self.pipeline, tp=rank % self.tensor)


@dataclass(frozen=True, slots=True)
class EpochMembership:
    """A numbered set of workers: `workers[r]` is the id of the worker that is rank r in this epoch.

    A single worker has one too. A message of another epoch is stale and refused.
    """

    epoch: int
    layout: ParallelLayout
    workers: tuple[int, ...]

    @classmethod
    def first(cls, layout: ParallelLayout) -> "EpochMembership":
        return cls(epoch=0, layout=layout, workers=tuple(range(layout.world_size)))


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """A node's part of a group of several nodes.

    host    this node's address: its cores listen there for the other nodes' frontends
    cores   data parallel ranks whose engine cores run here; none where only workers do
    ranks   ranks that run here and share the machine, those of other nodes' cores included
    """

    host: str
    cores: tuple[int, ...]
    ranks: int
