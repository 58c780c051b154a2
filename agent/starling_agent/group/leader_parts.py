"""All that the leader of a group has and other nodes have not."""

from dataclasses import dataclass

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.identity import Identity
from starling_agent.contract.scale import Operation
from starling_agent.group.joining import leader_of
from starling_agent.group.leader import Leader
from starling_agent.group.node_layout import is_led
from starling_agent.group.operation_times import OperationTimes
from starling_agent.group.operations import Operations
from starling_agent.group.resizing import ReportedResizer
from starling_agent.report_state import ReportState


@dataclass(frozen=True, slots=True)
class LeaderParts:
    """`resizing` where somebody has to bring the group to its size."""

    leader: Leader
    operations: Operations
    times: OperationTimes
    resizing: ReportedResizer | None


def lead_of(config: AgentConfig, identity: Identity, state: ReportState) -> LeaderParts | None:
    """None on nodes that do not lead."""
    leader = leader_of(config, identity, state.report)
    if leader is None:
        return None
    times = OperationTimes()

    def tell(operation: Operation) -> None:
        state.update(operation=operation)
        times.observe(operation)

    operations = Operations(config.layout, tell)
    resizing = ReportedResizer(leader, config.layout, operations, state.update) if is_led(config) else None
    return LeaderParts(leader, operations, times, resizing)
