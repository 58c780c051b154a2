"""Which part of a group runs on which of its nodes. Pure.

Ranks are numbered data parallel outermost, then stage by stage, and fill one node after the other. The engine core of a data
parallel rank runs on the node of its first worker.
"""

from dataclasses import dataclass

from starling_agent.contract.config import AgentConfig, LayoutConfig


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """`data` is the data parallel size now; the rest of the layout never changes."""

    layout: LayoutConfig
    data: int

    @property
    def workers(self) -> int:
        """Of one data parallel rank."""
        return self.layout.tensor * self.layout.pipeline

    @property
    def nodes(self) -> int:
        return -(-self.data * self.workers // self.layout.per_node)

    def cores(self, node: int) -> tuple[int, ...]:
        """Data parallel ranks whose cores run there."""
        return tuple(rank for rank in range(self.data) if rank * self.workers // self.layout.per_node == node)

    def workers_for_others(self, node: int) -> tuple[tuple[int, int], ...]:
        """Data parallel rank and rank within it of each worker there whose core runs on another node."""
        per_node = self.layout.per_node
        ranks = range(node * per_node, min((node + 1) * per_node, self.data * self.workers))
        found = (divmod(rank, self.workers) for rank in ranks)
        return tuple((core, rank) for core, rank in found if core * self.workers // per_node != node)


def most_places(layout: LayoutConfig) -> NodeLayout:
    """Those that the group can ever have. Where a rank runs does not depend on how many there are."""
    return NodeLayout(layout, layout.elastic.max if layout.elastic is not None else layout.data)


def is_led(config: AgentConfig) -> bool:
    """Whether somebody has to bring the group to its size: it can change, or its ranks hold experts in epochs."""
    engine = config.engine
    shares = bool(engine.get("enable_expert_parallel")) and (config.layout.data > 1 or bool(engine.get("enable_eplb")))
    return config.layout.elastic is not None or shares
