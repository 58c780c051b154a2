"""One elastic group in any state, and the turn that it is given."""

from typing import Any

from starling_agent.contract.config import ElasticConfig, LayoutConfig
from starling_agent.contract.report import GroupSize, Report, Topology
from starling_agent.contract.scale import Operation
from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec
from starling_crds.v1alpha1.status import OperationStatus
from starling_operator.plan.elastic.elastic_state import ElasticState
from starling_operator.plan.elastic.next_step import ElasticInput
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.timestamps import rfc3339

from tests.operator.plan.building import NOW, make_group, make_pod, make_report, pending

NAME = "chat-aaaaaaa-0"
LAYOUT = LayoutConfig(elastic=ElasticConfig(min=1, max=8))


def reported(phase: str, source: int = 2, target: int = 4, number: int = 1, **more: Any) -> Operation:
    """Makes the operation that a leader reports. Its id is the operator's unless `id` is given."""
    given = {"id": f"{NAME}-{target}-{number}", "source": source, "target": target, "phase": phase, "nodes": target}
    return Operation.model_validate(given | more)


def stored(phase: str, source: int = 2, target: int = 4, number: int = 1, since: float = 0.0, **more: Any) -> OperationStatus:
    """Makes the record of the operation in the status, `since` seconds old."""
    given = {
        "id": f"{NAME}-{target}-{number}",
        "source": {"data": source, "expert": source},
        "target": {"data": target, "expert": target},
        "phase": phase,
        "since": rfc3339(NOW - since),
    }
    return OperationStatus.model_validate(given | more)


def leader_report(effective: int, operation: Operation | None = None, **fields: Any) -> Report:
    topology = Topology(tensor=1, pipeline=1, data=effective, ranks=effective) if effective else None
    size = GroupSize(allocated=effective, joined=effective, effective=effective)
    return make_report(topology=topology, size=size, operation=operation, epoch=1, **fields)


def group_of(
    nodes: int,
    effective: int | None,
    operation: Operation | None = None,
    record: OperationStatus | None = None,
    streams: int = 0,
    **leader: Any,
) -> Group:
    """`effective` None: the leader has not answered. `streams` are open on its last pod."""
    report = None if effective is None else leader_report(effective, operation, **leader)
    pods: list[Pod] = []
    for number in range(nodes):
        fields: dict[str, Any] = {} if number < (effective or nodes) else pending(scheduled=True)
        own = report if number == 0 else make_report(open_streams=streams if number == nodes - 1 else 0)
        pods.append(make_pod(NAME, number, **(fields | {"report": own})))
    return make_group(NAME, pods, nodes=nodes, elastic=ElasticState(layout=LAYOUT, leader=report, stored=record))


def turn(desired: int | None, **fields: Any) -> ElasticInput:
    """Makes the turn of a group that serves and may begin an operation."""
    given: dict[str, Any] = {
        "desired": desired,
        "resizes": True,
        "serves": True,
        "at_wanted_size": False,
        "drain": DrainSpec(accept_seconds=5, seconds=60),
        "recovery": RecoverySpec(restart_budget=3, window_seconds=600),
        "now": NOW,
    }
    return ElasticInput(**(given | fields))
