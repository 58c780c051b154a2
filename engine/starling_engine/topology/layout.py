"""Where a rank stands in its group, and which membership the group is in. Pure: no torch, no processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place; dp is outermost, tp innermost."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How many ways each dimension of a group is split. EP spans data * tensor inside one pipeline stage."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor

    def samples(self, rank: int) -> bool:
        """Whether a step's results come from this rank: the first of the last stage."""
        place = self.coordinates(rank)
        return place.pp == self.pipeline - 1 and place.tp == 0

    def depth(self, *, asynchronous: bool) -> int:
        """Steps that may be in flight at once: one that each stage runs, and one to spare that is planned meanwhile."""
        return self.pipeline + (1 if asynchronous else 0)

    def coordinates(self, rank: int) -> Coordinates:
        """Raises IndexError for a rank outside the layout."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a layout of {self.world_size} ranks")
        return Coordinates(dp=rank // (self.pipeline * self.tensor), pp=rank // self.tensor % self.pipeline, tp=rank % self.tensor)


@dataclass(frozen=True, slots=True)
class EpochMembership:
    """A numbered set of workers: `workers[r]` is the id of the worker that is rank r in this epoch.

    Also a single worker has one. A message of another epoch is stale and refused.
    """

    epoch: int
    layout: ParallelLayout
    workers: tuple[int, ...]

    @classmethod
    def first(cls, layout: ParallelLayout) -> "EpochMembership":
        return cls(epoch=0, layout=layout, workers=tuple(range(layout.world_size)))
