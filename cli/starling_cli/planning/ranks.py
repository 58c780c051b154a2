"""Ranks of a group and their nodes. Pure."""

from dataclasses import dataclass

from starling_crds.layout import GroupLayout


@dataclass(frozen=True, slots=True)
class Rank:
    """Coordinates of one worker; data parallel is outermost. `expert` counts within its pipeline stage."""

    number: int
    node: int
    data: int
    pipeline: int
    tensor: int
    expert: int

    def __str__(self) -> str:
        return f"rank {self.number}: dp {self.data}, pp {self.pipeline}, tp {self.tensor}, ep {self.expert}"


def ranks_of(layout: GroupLayout) -> tuple[Rank, ...]:
    return tuple(_rank(layout, number, number // layout.per_node) for number in range(layout.ranks))


def _rank(layout: GroupLayout, number: int, node: int) -> Rank:
    rest, tensor = divmod(number, layout.tensor)
    data, pipeline = divmod(rest, layout.pipeline)
    return Rank(number, node, data, pipeline, tensor, data * layout.tensor + tensor)
