"""The experts that a group's ranks share, and the slots that ranks have for them. Pure."""

from dataclasses import dataclass

from starling_engine.config import EngineConfig
from starling_engine.errors import ConfigError
from starling_engine.model_config.config import ModelConfig
from starling_engine.topology.placement import Placement, even_slots, regroup, spread


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
