"""All that the leader of a group has and other nodes do not."""

from dataclasses import dataclass

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.identity import Identity
from starling_agent.contract.scale import Operation
from starling_agent.group.leader import Leader
from starling_agent.group.member import make_member
from starling_agent.group.node_layout import leader_sets_size
from starling_agent.group.operation_times import OperationTimes
from starling_agent.group.operations import Operations
from starling_agent.group.size_controller import SizeController
from starling_agent.report_state import ReportState


@dataclass(frozen=True, slots=True)
class LeaderParts:
    """`size_controller` is None where the group has its size from its configuration alone."""

    leader: Leader
    operations: Operations
    times: OperationTimes
    size_controller: SizeController | None


def make_leader_parts(config: AgentConfig, identity: Identity, state: ReportState) -> LeaderParts | None:
    """Returns None on nodes other than node 0."""
    if identity.node > 0:
        return None
    has_controller = leader_sets_size(config)
    data = 0 if has_controller else config.layout.data
    leader = Leader(make_member(config, identity, state.report), config.layout.largest.nodes, data)
    times = OperationTimes()

    def on_operation(operation: Operation) -> None:
        state.update(operation=operation)
        times.observe(operation)

    operations = Operations(config.layout, on_operation)
    controller = SizeController(leader, config.layout, operations, state.update) if has_controller else None
    return LeaderParts(leader, operations, times, controller)
