"""Epochs: numbered memberships of the cores that hold a model's experts among them. Pure: no torch, no processes.

Only exchanges between experts belong to an epoch; how a core's own ranks split a matrix or the layers never changes. A switch from
one epoch to the next is prepared beside the serving one, and all its ranks flip at the same step (`expert_parallel/dp_sync.py`).
The messages go from whoever leads the group to each core, and from there, unchanged, to each of its workers; and back.
"""

from collections.abc import Iterable, Mapping

import msgspec

from starling_engine.topology.layout import Coordinates, ParallelLayout
from starling_engine.topology.placement import Layer, Placement
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard


class EpochPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One core's part in epoch `number`.

    members     ids of the epoch's cores, in the order of their data parallel rank
    dp          this core's rank among them; None: it leaves
    placement   which experts lie where
    rendezvous  where the epoch's ranks meet: the store of the first core's rank 0
    nodes       how many nodes the members are on, as many on each and in their order; 1 also where that is not so
    served      the cores that serve before it: each of their ranks tells which experts it holds, for others to load from it
    """

    number: int
    members: tuple[int, ...]
    dp: int | None
    placement: Placement
    rendezvous: Rendezvous
    nodes: int = 1
    served: int = 0

    @property
    def data(self) -> int:
        return len(self.members)

    def stage_name(self, stage: int) -> str:
        """Of the group of ranks that share the experts of a stage, in the store."""
        return f"epoch/{self.number}/{stage}"

    def exchange(self, layout: ParallelLayout, place: Coordinates) -> tuple[str, Shard]:
        """The name of the group of ranks that share the experts of a stage, and which of them this core's rank at `place` is."""
        assert self.dp is not None, "whoever leaves has no place"
        shard = Shard(self.dp * layout.tensor + place.tp, self.data * layout.tensor)
        return self.stage_name(place.pp), shard

    def call(self, ep: int, layout: ParallelLayout, stage: int) -> str:
        """What errors call rank `ep` of those that share the experts of a stage, in cores of `layout`."""
        dp, tp = divmod(ep, layout.tensor)
        return f"rank {stage * layout.tensor + tp} of engine core {dp}"


class Prepare(msgspec.Struct, tag="prepare"):
    """Make ready for an epoch beside the one that serves. Answered by Prepared, or by Unprepared, which leaves all as it was."""

    epoch: EpochPlan


class Commit(msgspec.Struct, tag="commit"):
    """Switch to the epoch that was prepared, at the step at which all its ranks can. Answered by Switched."""

    number: int


class Abandon(msgspec.Struct, tag="abandon"):
    """Forget the epoch that was prepared, or is being prepared."""

    number: int


EpochOrder = Prepare | Commit | Abandon


PEERS, CHECKPOINT = "peers", "checkpoint"
"""Where experts come from: other ranks that hold them, or the files."""


class ExpertLoads(msgspec.Struct):
    """Experts that came from one source; the seconds are those of each rank that loaded, in all."""

    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, other: "ExpertLoads") -> None:
        self.experts += other.experts
        self.bytes += other.bytes
        self.seconds += other.seconds

    @property
    def rate(self) -> float:
        """Bytes a second, of one rank."""
        return self.bytes / self.seconds if self.seconds else 0.0


class Prepared(msgspec.Struct, tag="prepared"):
    """`loaded`: the experts that the core's ranks loaded for it, by where they came from; see `FastestSource`."""

    number: int
    seconds: float
    loaded: dict[str, ExpertLoads] = {}


class Unprepared(msgspec.Struct, tag="unprepared"):
    number: int
    error: str


def merge_loaded(each: Iterable[Mapping[str, ExpertLoads]]) -> dict[str, ExpertLoads]:
    """By source, of all."""
    total: dict[str, ExpertLoads] = {}
    for loaded in each:
        for source, part in loaded.items():
            total.setdefault(source, ExpertLoads()).add(part)
    return total


class Switched(msgspec.Struct, tag="switched"):
    """It is in the epoch, or out of it where it leaves."""

    number: int


class Balance(msgspec.Struct, tag="balance"):
    """How evenly the ranks that share a stage's experts had to work of late: the mean by the most tokens of a rank, 1 is best."""

    stage: int
    now: float


class Rearranged(msgspec.Struct, tag="rearranged"):
    """Experts of a stage have moved within an epoch.

    layers     where the stage's experts lie now, by layer as in `Placement`
    moved      experts that ranks loaded, in all
    seconds    from its begin to the last layer's change
    before     the balance that it was begun for
    after      the balance to expect of the same load
    complete   False where it was given up: some layers may have changed all the same
    """

    epoch: int
    stage: int
    layers: dict[int, Layer]
    moved: int
    seconds: float
    before: float
    after: float
    complete: bool = True


EpochAnswer = Prepared | Unprepared | Switched
