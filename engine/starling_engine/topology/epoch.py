"""Epochs: numbered sets of engine cores whose ranks together hold a model's experts. Data only: no torch, no processes.

Only expert parallelism depends on the epoch: the tensor and pipeline parallelism of a core never changes. A switch from
one epoch to the next is prepared beside the serving one, and all its ranks flip at the same step (`expert_parallel/dp_sync.py`).
The commands go from the group's coordinator to each core, and from there, unchanged, to each of its ranks; replies come back.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from starling_engine.topology.layout import Coordinates, ParallelLayout
from starling_engine.topology.placement import Layer, Placement
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.topology.shard import Shard


class EpochPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of epoch `number` for one core.

    cores       ids of the epoch's cores, in the order of their data parallel rank
    dp          this core's rank among them; None: it leaves
    placement   which rank holds which experts
    rendezvous  where the epoch's ranks meet: the store of the first core's rank 0
    nodes       number of nodes, if each has equally many of the cores, one after the other; otherwise 1
    served      number of cores in the epoch before, whose ranks publish which experts they hold, for others to load
    """

    number: int
    cores: tuple[int, ...]
    dp: int | None
    placement: Placement
    rendezvous: Rendezvous
    nodes: int = 1
    served: int = 0

    @property
    def data(self) -> int:
        return len(self.cores)

    def stage_name(self, stage: int) -> str:
        """Returns the name, in the TCPStore, of the communicator of the ranks that share a pipeline stage's experts."""
        return f"epoch/{self.number}/{stage}"

    def exchange(self, layout: ParallelLayout, at: Coordinates) -> tuple[str, Shard]:
        """Returns the name of that communicator, and the shard of the experts of this core's rank `at`."""
        assert self.dp is not None, "a core that leaves has no rank"
        shard = Shard(self.dp * layout.tensor + at.tp, self.data * layout.tensor)
        return self.stage_name(at.pp), shard

    def rank_name(self, ep: int, layout: ParallelLayout, stage: int) -> str:
        """Returns how error messages name rank `ep` of those that share a stage's experts, in cores of `layout`."""
        dp, tp = divmod(ep, layout.tensor)
        return f"rank {stage * layout.tensor + tp} of engine core {dp}"


class Prepare(msgspec.Struct, tag="prepare"):
    """Make ready for an epoch beside the one that serves. Answered by Prepared, or by Unprepared: nothing has changed then."""

    epoch: EpochPlan


class Commit(msgspec.Struct, tag="commit"):
    """Switch to the prepared epoch, at the first step at which all its ranks are ready. Answered by Switched."""

    number: int


class Abandon(msgspec.Struct, tag="abandon"):
    """Forget the epoch that was prepared, or is being prepared. Not answered."""

    number: int


EpochCommand = Prepare | Commit | Abandon


PEERS, CHECKPOINT = "peers", "checkpoint"
"""Sources of experts: other ranks that hold them, or the files."""


class ExpertLoads(msgspec.Struct):
    """Experts that came from one source; the seconds are summed over the ranks that loaded."""

    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, other: "ExpertLoads") -> None:
        self.experts += other.experts
        self.bytes += other.bytes
        self.seconds += other.seconds

    @property
    def rate(self) -> float:
        """Bytes per second and rank."""
        return self.bytes / self.seconds if self.seconds else 0.0


class Prepared(msgspec.Struct, tag="prepared"):
    """`loaded`: the experts that were loaded for the epoch, by their source; see `FastestSource`."""

    number: int
    seconds: float
    loaded: dict[str, ExpertLoads] = {}


class Unprepared(msgspec.Struct, tag="unprepared"):
    """A rank cannot take part in the epoch; then its core cannot, and one such reply is enough."""

    number: int
    error: str


class Switched(msgspec.Struct, tag="switched"):
    """The rank is in the epoch now, or out of it where it leaves."""

    number: int


class Balance(msgspec.Struct, tag="balance"):
    """Recent load of the ranks that share a stage's experts: mean tokens per rank over those of the busiest; 1 is best."""

    stage: int
    now: float


class Rearranged(msgspec.Struct, tag="rearranged"):
    """Experts of a stage have moved within an epoch.

    layers     the stage's placement now, by layer as in `Placement`
    moved      experts that ranks loaded, in all
    seconds    from its start to the change of the last layer
    before     the measured balance that caused it
    after      the balance expected under the same load
    complete   False if it was given up; some layers may have changed nevertheless
    """

    epoch: int
    stage: int
    layers: dict[int, Layer]
    moved: int
    seconds: float
    before: float
    after: float
    complete: bool = True


EpochReply = Prepared | Unprepared | Switched


def merge_loaded(each: Iterable[Mapping[str, ExpertLoads]]) -> dict[str, ExpertLoads]:
    """Sums loads by source."""
    total: dict[str, ExpertLoads] = {}
    for loaded in each:
        for source, loads in loaded.items():
            total.setdefault(source, ExpertLoads()).add(loads)
    return total


def merge_prepared(replies: Sequence[Prepared]) -> Prepared:
    """Merges the replies of all ranks of a core: the seconds of the slowest, and the loads of all."""
    return Prepared(replies[0].number, max(reply.seconds for reply in replies), merge_loaded(reply.loaded for reply in replies))


def merge_switched(replies: Sequence[Switched]) -> Switched:
    """Merges the replies of all ranks of a core, which are alike."""
    return replies[0]
