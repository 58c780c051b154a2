"""The status: groups that exist and serve, as their agents report it."""

from collections.abc import Sequence
from typing import Any

from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.report import Topology
from starling_crds.v1alpha1.status import Condition, GroupNode, GroupStatus, InferenceServiceStatus, RevisionStatus, RouterStatus

from starling_operator.plan import labels, names
from starling_operator.plan.elastic.elastic_state import ended
from starling_operator.plan.elastic.messages import operation_text
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.progress import progress_mark, progress_text
from starling_operator.plan.recovery import restart_times
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.timestamps import rfc3339

_KEPT_TIMES = 20
DETAILED_PODS = 128
"""Pods that are shown one by one; those of groups that do not serve come first, and of these those of small groups."""
MOST_ENDPOINTS = 256
_LONGEST_MESSAGE = 1000


def make_status(inputs: StatusInputs, conditions: list[Condition]) -> InferenceServiceStatus:
    """Makes the status of the groups that stay. New groups appear in it once they are observed."""
    groups = [_group(inputs, group) for group in inputs.kept]
    return InferenceServiceStatus(
        observed_generation=inputs.service.generation,
        conditions=conditions,
        replicas=len(groups),
        ready_replicas=len(inputs.ready),
        updated_replicas=sum(group.revision == inputs.spec_revision for group in inputs.ready),
        selector=labels.leader_selector(inputs.service),
        topology=", ".join(sorted({group.topology for group in groups if group.ready and group.topology})),
        url=service_url(inputs),
        endpoints=_endpoints(inputs)[:MOST_ENDPOINTS],
        revision=RevisionStatus(current=_serving_revision(inputs), target=_target_revision(inputs)),
        canary=inputs.canary.status if inputs.canary is not None else inputs.taken_back,
        groups=summarised(groups),
        router=_router(inputs),
        scaling=inputs.scale.status,
        gang_released_at=_gang_released_at(inputs),
    )


def _router(inputs: StatusInputs) -> RouterStatus | None:
    state = inputs.router
    return None if state is None else RouterStatus(replicas=state.replicas, ready=state.ready)


def _endpoints(inputs: StatusInputs) -> list[str]:
    pods = (pod for group in inputs.kept for pod in group.remaining_pods)
    return [authority(pod.address, ENDPOINT_PORT) for pod in pods if pod.ready and pod.address]


def service_url(inputs: StatusInputs) -> str:
    """Base URL of the OpenAI API inside the cluster; the last one known if the spec cannot be read."""
    service, spec = inputs.service, inputs.service.spec
    if spec is None:
        return service.status.url
    scheme, usual = ("https", 443) if spec.endpoint.tls_secret else ("http", 80)
    port = "" if spec.endpoint.port == usual else f":{spec.endpoint.port}"
    return f"{scheme}://{names.host(service.name, service.namespace, inputs.settings.cluster_domain)}{port}/v1"


def topology_text(topology: Topology | None) -> str:
    """Formats a topology as TP2 PP1 DP4, with EP where experts are spread."""
    if topology is None:
        return ""
    text = f"TP{topology.tensor} PP{topology.pipeline} DP{topology.data}"
    return f"{text} EP{topology.expert}" if topology.expert > 1 else text


def _gang_released_at(inputs: StatusInputs) -> str:
    """Time at which a group last released its nodes; "" once all groups exist again."""
    if inputs.rollout.releases_nodes:
        return rfc3339(inputs.now)
    all_exist = len(inputs.groups.current) >= inputs.replicas
    return "" if all_exist else inputs.service.status.gang_released_at


def _target_revision(inputs: StatusInputs) -> str:
    return inputs.spec_revision or inputs.service.status.revision.target


def _serving_revision(inputs: StatusInputs) -> str:
    """Returns the target revision once all groups are of it and serve; until then the revision before."""
    ready = [group for group in inputs.current if inputs.is_ready(group)]
    all_serve = ready and len(ready) == len(inputs.current) >= inputs.replicas and not inputs.groups.old
    return inputs.target_revision if all_serve else inputs.service.status.revision.current


def _group(inputs: StatusInputs, group: Group) -> GroupStatus:
    leader = next((pod.report for pod in group.remaining_pods if pod.number == 0 and pod.report is not None), None)
    previous, ready = group.previous, inputs.is_ready(group)
    restarts = _restarted_at(inputs, group)
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
        **_sizes(inputs, group),
        nodes=_nodes(inputs, group),
        progress="" if ready else _progress(inputs, group),
        progressed_at="" if ready else rfc3339(group.progressed_at),
        message=inputs.unready.get(group.name, "") or _resize_text(inputs, group),
    )


def _resize_text(inputs: StatusInputs, group: Group) -> str:
    step = inputs.elastic_steps.get(group.name)
    operation = step.operation if step is not None else None
    return operation_text(inputs, operation) if operation is not None and not ended(operation) else ""


def _sizes(inputs: StatusInputs, group: Group) -> dict[str, Any]:
    """Fields of an elastic group. Its leader's last report stays while the leader is silent."""
    state, step, known = group.elastic, inputs.elastic_steps.get(group.name), group.previous
    if state is None:
        return {}
    sizes: dict[str, Any] = {"operation": step.operation if step is not None else state.stored}
    if inputs.desired is not None and group.target:
        sizes["desired"] = state.size(inputs.desired.data)
    elif known is not None:
        sizes["desired"] = known.desired
    for name in ("allocated", "joined", "effective"):
        if state.leader is not None:
            sizes[name] = state.size(getattr(state.leader.size, name))
        elif known is not None:
            sizes[name] = getattr(known, name)
    return sizes


def _known_topology(group: Group) -> str:
    return group.previous.topology if group.was_ready and group.previous is not None else ""


def _restarted_at(inputs: StatusInputs, group: Group) -> list[str]:
    """Times of restarts within the window; the newest of them if there are many."""
    if inputs.service.spec is None:
        return list(group.previous.restarted_at) if group.previous else []
    recovery, decision = inputs.service.spec.recovery, inputs.recoveries.get(group.name)
    times = restart_times(group, recovery, inputs.now)
    if decision is not None and decision.counted:
        times.append(inputs.now)
    return [rfc3339(time) for time in times[-max(_KEPT_TIMES, recovery.restart_budget) :]]


def _nodes(inputs: StatusInputs, group: Group) -> list[GroupNode]:
    """The record of a group's pods. While a restart waits for its time, it stays: it shows the failure."""
    if group.previous is not None and _restart_waits(inputs, group):
        return list(group.previous.nodes)
    # More than a status shows need no record. The one more tells such groups from those that fit, which come first.
    return [_node(pod) for pod in _recorded(inputs, group)[: DETAILED_PODS + 1]]


def _progress(inputs: StatusInputs, group: Group) -> str:
    if group.previous is not None and _restart_waits(inputs, group):
        return group.previous.progress
    return progress_mark(_recorded(inputs, group))


def _restart_waits(inputs: StatusInputs, group: Group) -> bool:
    decision = inputs.recoveries.get(group.name)
    return decision is not None and decision.wait > 0


def _recorded(inputs: StatusInputs, group: Group) -> list[Pod]:
    """Pods that stay after this decision."""
    decision = inputs.recoveries.get(group.name)
    deleted = {pod.uid for pod in decision.delete} if decision is not None else set()
    return [pod for pod in group.remaining_pods if pod.uid not in deleted]


def _node(pod: Pod) -> GroupNode:
    report = pod.report
    return GroupNode(
        pod=pod.name,
        number=pod.number,
        host=pod.cluster_node,
        phase=report.phase if report is not None else pod.phase,
        progress=progress_text(report.progress) if report is not None else "",
        uid=pod.uid,
        restarts=pod.restarts,
    )


def summarised(groups: Sequence[GroupStatus]) -> list[GroupStatus]:
    """Keeps a status small, since etcd refuses a large object. Small groups come first, so one large group hides no other.

    Pods beyond the limit are left out, from the last of a group on. A group without any loses its message too.
    """
    left, shown = DETAILED_PODS, {}
    for group in sorted(groups, key=lambda group: (group.ready, len(group.nodes))):
        shown[group.name] = left
        left = max(0, left - max(1, len(group.nodes)))
    return [_shortened(group, shown[group.name]) for group in groups]


def _shortened(group: GroupStatus, pods: int) -> GroupStatus:
    message = group.message[:_LONGEST_MESSAGE] if pods else ""
    return group.model_copy(update={"nodes": group.nodes[:pods], "message": message})
