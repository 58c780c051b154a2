"""All that the leader of a group has and other nodes do not."""

from dataclasses import dataclass

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.identity import Identity
from starling_agent.group.leader import Leader
from starling_agent.group.membership import make_member
from starling_agent.group.node_layout import leader_sets_size
from starling_agent.group.operations import Operations
from starling_agent.group.size_controller import SizeController
from starling_agent.report_state import ReportState


@dataclass(frozen=True, slots=True)
class LeaderParts:
    """`size_controller` is None where the group has its size from its configuration alone."""

    leader: Leader
    operations: Operations
    size_controller: SizeController | None


def make_leader_parts(config: AgentConfig, identity: Identity, state: ReportState) -> LeaderParts | None:
    """Returns None on nodes other than node 0."""
    if identity.node > 0:
        return None
    sets_size = leader_sets_size(config)
    data = 0 if sets_size else config.layout.data
    leader = Leader(make_member(config, identity, state.report), config.layout.largest.nodes, data)
    controller = SizeController(leader, config.layout, state.update)
    return LeaderParts(leader, Operations(config.layout, controller, state.update), controller if sets_size else None)
