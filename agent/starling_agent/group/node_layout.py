"""Assignment of a group's ranks to its nodes. Pure.

Ranks are numbered data parallel outermost, then stage by stage, and fill one node after the other. The engine core of a data
parallel rank runs on the node of its first worker.
"""

from dataclasses import dataclass

from starling_crds.layout import GroupLayout

from starling_agent.contract.config import AgentConfig


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Cores and workers by node. Where a rank runs does not depend on the data parallel size."""

    group: GroupLayout

    def cores(self, node: int) -> tuple[int, ...]:
        """Returns the data parallel ranks whose cores run on the node."""
        return tuple(dp for dp in range(self.group.data) if self._node_of_core(dp) == node)

    def workers_for_others(self, node: int) -> tuple[tuple[int, int], ...]:
        """Returns the workers on the node whose core runs on another one, each as data parallel rank and rank within that."""
        first, group = node * self.group.per_node, self.group
        ranks = range(first, min(first + group.per_node, group.ranks))
        found = (divmod(rank, group.core_ranks) for rank in ranks)
        return tuple((dp, rank) for dp, rank in found if self._node_of_core(dp) != node)

    def _node_of_core(self, dp: int) -> int:
        return dp * self.group.core_ranks // self.group.per_node


def leader_sets_size(config: AgentConfig) -> bool:
    """Returns whether the leader brings the group to its size: it can change, or its ranks hold experts in epochs."""
    engine = config.engine
    shares = bool(engine.get("enable_expert_parallel")) and (config.layout.data > 1 or bool(engine.get("enable_eplb")))
    return config.layout.elastic is not None or shares
