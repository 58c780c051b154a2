"""Which part of a group runs on which of its nodes. Pure.

Ranks are numbered data parallel outermost, then stage by stage, and fill one node after the other. The engine core of a data
parallel rank runs on the node of its first worker.
"""

from dataclasses import dataclass

from starling_agent.contract.config import LayoutConfig


@dataclass(frozen=True, slots=True)
class Places:
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


def most_nodes(layout: LayoutConfig) -> int:
    """That the group can ever have."""
    return Places(layout, layout.elastic.max if layout.elastic is not None else layout.data).nodes
