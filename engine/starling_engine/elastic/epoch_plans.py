"""Plans of epochs: which cores are in one, and which rank holds which experts. Pure, but for the cores' connections."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from starling_engine.config import EngineConfig
from starling_engine.core.client import CoreClient
from starling_engine.errors import ConfigError
from starling_engine.model_config.config import ModelConfig
from starling_engine.topology.epoch import EpochPlan
from starling_engine.topology.placement import Placement, even_slots, regroup, spread
from starling_engine.topology.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True)
class EpochCore:
    """A core of the group, with an id that never changes, and the address of its node."""

    id: int
    client: CoreClient
    host: str

    @property
    def store(self) -> int:
        """Port of the store that its rank 0 serves."""
        assert self.client.hello is not None, "only cores that have loaded are in an epoch"
        return self.client.hello.store


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpace:
    """Size of the placement problem: `experts` in each of `layers`, ranks with `slots` a layer, `tensor` ranks a core."""

    experts: int
    layers: int
    slots: int
    tensor: int
    redundant: int | None = None
    """Copies of experts that are wanted, without the first of each; None: none, and ranks may hold one expert more than others."""

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> "ExpertSpace":
        worker = config.worker
        assert model.moe is not None and worker.dp_sync, "only experts are shared by several cores"
        return cls(
            experts=model.moe.num_experts,
            layers=len(model.moe.layers),
            slots=worker.expert_slots,
            tensor=worker.layout.tensor,
            redundant=worker.eplb.redundant if worker.eplb is not None else None,
        )

    def check(self, cores: int) -> None:
        """Raises ConfigError where `cores` cannot hold the experts, or have not one each."""
        least, most = -(-self.experts // (self.slots * self.tensor)), self.experts // self.tensor
        if not least <= cores <= most:
            raise ConfigError(
                f"{self.experts} experts and room for {self.slots} on each rank: {least} to {most} are possible, got {cores}",
                "data_parallel_size",
            )

    def copies(self, ranks: int) -> int:
        """Returns the copies of a layer's experts on `ranks`, without the first of each."""
        if self.redundant is None:
            return 0
        return min(self.slots, even_slots(self.experts, ranks, self.redundant)) * ranks - self.experts

    def place(self, now: Placement | None, cores: int) -> Placement:
        """Places the experts on `cores`, the first of which are those of `now`; few experts move."""
        ranks = cores * self.tensor
        if now is None:
            return spread(self.experts, ranks, self.layers, self.slots, self.copies(ranks))
        return regroup(now, ranks, self.slots, self.copies(ranks))


def make_plans(number: int, cores: Sequence[EpochCore], placement: Placement, patience: float, served: int) -> list[EpochPlan]:
    """Makes each core's plan for epoch `number`, in the order of their data parallel ranks.

    They meet at the first one's store, where each waits `patience` seconds for another. `served` as in `EpochPlan`.
    """
    first, ids = cores[0], tuple(core.id for core in cores)
    nodes = count_nodes([core.host for core in cores])
    return [
        EpochPlan(
            number=number,
            cores=ids,
            dp=dp,
            placement=placement,
            rendezvous=Rendezvous(first.host, first.store, core.host, patience),
            nodes=nodes,
            served=served,
        )
        for dp, core in enumerate(cores)
    ]


def leaving_plan(epoch_plan: EpochPlan) -> EpochPlan:
    """Makes the plan for a core that is not in the epoch of `epoch_plan`."""
    return msgspec.structs.replace(epoch_plan, dp=None)


def count_nodes(hosts: Sequence[str]) -> int:
    """Counts the nodes of cores, where each node has equally many, next to each other; else returns 1."""
    sizes = [len(list(same)) for _, same in groupby(hosts)]
    return len(sizes) if len(set(sizes)) == 1 and len(sizes) == len(set(hosts)) else 1
