"""The status: what exists and serves, as agents report it, group by group."""

from typing import Any

from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.report import Topology
from starling_crds.v1alpha1.status import Condition, GroupNode, GroupStatus, InferenceServiceStatus, RevisionStatus

from starling_operator.plan import labels, names
from starling_operator.plan.clock import rfc3339
from starling_operator.plan.elastic.elastic_state import ended
from starling_operator.plan.elastic.words import operation_text
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.progress import progress_text
from starling_operator.plan.recovery import restart_times
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.summary import MOST_ENDPOINTS, summarised

_KEPT_TIMES = 20


def make_status(situation: StatusInputs, conditions: list[Condition]) -> InferenceServiceStatus:
    """Of the groups that stay. What was decided just now shows when it is seen."""
    groups = [_group(situation, group) for group in situation.kept]
    return InferenceServiceStatus(
        observed_generation=situation.service.generation,
        conditions=conditions,
        replicas=len(groups),
        ready_replicas=len(situation.ready),
        updated_replicas=sum(group.target for group in situation.ready),
        selector=labels.leader_selector(situation.service),
        topology=", ".join(sorted({group.topology for group in groups if group.ready and group.topology})),
        url=service_url(situation),
        endpoints=_endpoints(situation)[:MOST_ENDPOINTS],
        revision=RevisionStatus(current=_serving_revision(situation), target=_target(situation)),
        groups=summarised(groups),
        gang_released_at=_released_at(situation),
    )


def _endpoints(situation: StatusInputs) -> list[str]:
    pods = (pod for group in situation.kept for pod in group.live)
    return [authority(pod.address, ENDPOINT_PORT) for pod in pods if pod.ready and pod.address]


def service_url(situation: StatusInputs) -> str:
    """Base URL of the OpenAI API inside the cluster; of an unreadable spec the last one known."""
    service, spec = situation.service, situation.spec
    if spec is None:
        return service.status.url
    scheme, usual = ("https", 443) if spec.endpoint.tls_secret else ("http", 80)
    port = "" if spec.endpoint.port == usual else f":{spec.endpoint.port}"
    return f"{scheme}://{names.host(service.name, service.namespace, situation.settings.cluster_domain)}{port}/v1"


def topology_text(topology: Topology | None) -> str:
    """TP2 PP1 DP4, with EP where experts are spread."""
    if topology is None:
        return ""
    text = f"TP{topology.tensor} PP{topology.pipeline} DP{topology.data}"
    return f"{text} EP{topology.expert}" if topology.expert > 1 else text


def _released_at(situation: StatusInputs) -> str:
    """Forgotten when all groups are there again."""
    if situation.change.released:
        return rfc3339(situation.now)
    whole = len(situation.groups.current) >= situation.replicas
    return "" if whole else situation.service.status.gang_released_at


def _target(situation: StatusInputs) -> str:
    return situation.target or situation.service.status.revision.target


def _serving_revision(situation: StatusInputs) -> str:
    """It moves to the target when that serves alone, and in full."""
    ready = [group for group in situation.current if situation.is_ready(group)]
    whole = ready and len(ready) == len(situation.current) >= situation.replicas and not situation.groups.old
    return situation.target if whole else situation.service.status.revision.current


def _group(situation: StatusInputs, group: Group) -> GroupStatus:
    leader = next((pod.report for pod in group.live if pod.number == 0 and pod.report is not None), None)
    previous, ready = group.previous, situation.is_ready(group)
    restarts = _restarted_at(situation, group)
    return GroupStatus(
        name=group.name,
        revision=group.revision,
        index=group.index,
        ready=ready,
        served=ready or (previous is not None and previous.served),
        topology=topology_text(leader.topology) if leader else _known_topology(group),
        ranks=leader.topology.ranks if leader and leader.topology else 0,
        epoch=leader.epoch if leader else 0,
        restarts=len(restarts),
        restarted_at=restarts,
        **_sizes(situation, group),
        nodes=_nodes(situation, group),
        progressed_at="" if ready else rfc3339(group.progressed_at),
        message=situation.unready.get(group.name, "") or _changing(situation, group),
    )


def _changing(situation: StatusInputs, group: Group) -> str:
    step = situation.steps.get(group.name)
    operation = step.operation if step is not None else None
    return operation_text(situation, operation) if operation is not None and not ended(operation) else ""


def _sizes(situation: StatusInputs, group: Group) -> dict[str, Any]:
    """Of an elastic group. What its leader said last stays while it is silent."""
    sizing, step, known = group.sizing, situation.steps.get(group.name), group.previous
    if sizing is None:
        return {}
    sizes: dict[str, Any] = {"operation": step.operation if step is not None else sizing.stored}
    if situation.desired is not None and group.target:
        sizes["desired"] = sizing.size(situation.desired.data)
    elif known is not None:
        sizes["desired"] = known.desired
    for name in ("allocated", "joined", "effective"):
        if sizing.leader is not None:
            sizes[name] = sizing.size(getattr(sizing.leader.size, name))
        elif known is not None:
            sizes[name] = getattr(known, name)
    return sizes


def _known_topology(group: Group) -> str:
    return group.previous.topology if group.believed and group.previous is not None else ""


def _restarted_at(situation: StatusInputs, group: Group) -> list[str]:
    """Within the window; the last few where a container restarts all the time."""
    if situation.spec is None:
        return list(group.previous.restarted_at) if group.previous else []
    recovery, healing = situation.spec.recovery, situation.healing.get(group.name)
    times = restart_times(group, recovery, situation.now)
    if healing is not None and healing.counted:
        times.append(situation.now)
    return [rfc3339(time) for time in times[-max(_KEPT_TIMES, recovery.restart_budget) :]]


def _nodes(situation: StatusInputs, group: Group) -> list[GroupNode]:
    """While a restart waits for its time, the record stays as it was: by it the failure is known."""
    healing = situation.healing.get(group.name)
    if healing is not None and healing.wait > 0 and group.previous is not None:
        return list(group.previous.nodes)
    going = {pod.uid for pod in healing.delete} if healing is not None else set()
    return [_node(pod) for pod in group.live if pod.uid not in going]


def _node(pod: Pod) -> GroupNode:
    report = pod.report
    return GroupNode(
        pod=pod.name,
        number=pod.number,
        host=pod.host,
        phase=report.phase if report is not None else pod.phase,
        progress=progress_text(report.progress) if report is not None else "",
        uid=pod.uid,
        restarts=pod.restarts,
    )
