"""Readiness of a group: its agents report that they serve what the spec asks for. If not, a reason says why."""

from dataclasses import dataclass, replace

from starling_agent.contract.report import Report
from starling_crds.layout import GroupLayout
from starling_crds.spec_layout import group_layout
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.config import in_words_of_the_spec
from starling_operator.plan.elastic.parallelism_scale import Desired
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.progress import progress_text
from starling_operator.plan.revision import Revision

LOADED = frozenset({"warming", "serving", "draining"})
"""Phases of an agent that has the model in memory."""


@dataclass(frozen=True, slots=True)
class ExpectedReports:
    """Reports that agents of the target revision have to give.

    config_hash       digest of agent.json
    expert            expert parallel size; None if the spec leaves it to the model
    commit            commit of the hub's repository; None while unknown
    weights           digest of the files that most agents have; None while unknown
    through_service   a token must have come through the Service, not only through each pod's own endpoint
    """

    config_hash: str
    layout: GroupLayout
    expert: int | None = None
    commit: str | None = None
    weights: str | None = None
    through_service: bool = False


def expected_reports(spec: InferenceServiceSpec, target: Revision, desired: Desired | None = None) -> ExpectedReports:
    layout, expert = group_layout(spec.parallelism, spec.accelerators.per_node), spec.parallelism.expert
    if desired is not None:
        layout = layout.with_data(desired.data)
        expert = layout.expert if expert is not None else None
    return ExpectedReports(target.config_hash, layout, expert, through_service=target.has_service)


def stored_reports(revision: Revision) -> ExpectedReports:
    """Reads what agents of a revision report that serves while the spec asks for another one. Its size does not change."""
    split = revision.layout
    layout = GroupLayout(tensor=split.tensor, pipeline=split.pipeline, data=split.data, per_node=split.per_node)
    return ExpectedReports(revision.config_hash, layout, through_service=revision.has_service)


def unready_reason(group: Group, expected: ExpectedReports) -> str:
    """Returns why the group is not ready; "" if it is. Groups of an old revision are judged by their probes alone."""
    if not group.target and not group.is_canary:
        return "" if group.available else waiting_reason(group)
    if len(group.needed_pods) != group.needed_nodes or not all(pod.ready for pod in group.needed_pods):
        return waiting_reason(group)
    if group.elastic is not None and not group.elastic.effective and not group.was_ready:
        return waiting_reason(group) or f"{group.name}: it has no size yet"
    return next(filter(None, (_pod_unready_reason(pod, expected, group) for pod in group.needed_pods)), "")


def is_at_wanted_size(group: Group, expected: ExpectedReports) -> bool:
    """True if an elastic group has the wanted size: all its pods serve at it, and there are no others."""
    pods, wanted = group.remaining_pods, expected.layout.nodes
    return (
        len(pods) == group.nodes == wanted
        and all(pod.ready for pod in pods)
        and all(not _pod_unready_reason(pod, expected, group) for pod in pods)
        and all(pod.report is None or not _topology_differs(pod, pod.report, expected) for pod in pods)
    )


def waiting_reason(group: Group) -> str:
    """Returns the pod that keeps the group from serving, with its cause: of several, the one that most needs intervention."""
    if group.pod_creation_error:
        return f"{group.name}: {len(group.missing)} of {group.nodes} pods are not created: {group.pod_creation_error}"
    for pod in sorted(group.remaining_pods, key=_urgency):
        if not pod.ready or pod.waiting:
            return pod_message(pod)
    leaving = [pod for pod in group.pods if pod.deleted_at is not None or pod.lost]
    if leaving:
        return f"{leaving[0].name}: " + (f"its node {leaving[0].cluster_node} is gone" if leaving[0].lost else "is being deleted")
    missing = group.nodes - len(group.remaining_pods)
    if missing > 0:
        return f"{group.name}: {missing} of {group.nodes} pods are still to be created"
    return ""


def pod_message(pod: Pod) -> str:
    """Describes a pod in one line: what it does or waits for, with the cause that its agent gives, if any."""
    return f"{pod.name}: {_state(pod)}"


def phase_text(report: Report) -> str:
    """Formats a phase as: downloading 3.2/7.6 GB, about 40 s left."""
    parts = " ".join(filter(None, (report.phase, progress_text(report.progress))))
    eta = report.progress.eta_seconds if report.progress else None
    return parts if eta is None else f"{parts}, about {max(1, round(eta))} s left"


def has_model_loaded(group: Group) -> bool:
    """True if all agents of the gang have the model in memory."""
    return len(group.gang_pods) == group.gang_size and all(
        pod.report.phase in LOADED if pod.report is not None else group.was_ready and not pod.report_error
        for pod in group.gang_pods
    )


def _pod_unready_reason(pod: Pod, expected: ExpectedReports, group: Group) -> str:
    report = pod.report
    if pod.unlabelled:
        return f"{pod.name}: it lost its labels, so that no requests come to it; it is replaced"
    if pod.report_error:
        return pod_message(pod)
    if report is None:
        return "" if group.was_ready else pod_message(pod) if pod.refuses_token else f"{pod.name}: its agent has not reported yet"
    if report.phase != "serving" or not report.ready or not report.healthy:
        return pod_message(pod)
    if report.config_hash != expected.config_hash:
        return f"{pod.name}: its agent runs another configuration than the revision's ({report.config_hash[:12]})"
    if not report.token_seen:
        return f"{pod.name}: no token came through its endpoint yet"
    if report.service_token_seen is False or (expected.through_service and not report.service_token_seen):
        return f"{pod.name}: no token came through the Service yet" + (f": {report.last_error}" if report.last_error else "")
    return _weights_differ(pod, report, expected) or _topology_differs(pod, report, _expected_now(group, expected))


def _weights_differ(pod: Pod, report: Report, expected: ExpectedReports) -> str:
    """Compares commit and digest. Agents of earlier releases report neither."""
    if expected.commit and report.commit and report.commit != expected.commit:
        return f"{pod.name}: serves commit {report.commit[:12]} of the model, but its revision is pinned to {expected.commit[:12]}"
    if expected.weights and report.weights and report.weights != expected.weights:
        return (
            f"{pod.name}: serves other weights ({report.weights[:12]}) than the other pods of its revision"
            f" ({expected.weights[:12]}); model.source must hold the same files on each node"
        )
    return ""


def _expected_now(group: Group, expected: ExpectedReports) -> ExpectedReports | None:
    """Returns what is expected at a group's present size; None while that changes: its nodes switch one after the other."""
    state = group.elastic
    if state is None:
        return expected
    if state.is_changing or not state.effective:
        return None
    layout = expected.layout.with_data(state.effective)
    return replace(expected, layout=layout, expert=layout.expert if expected.expert is not None else None)


def _topology_differs(pod: Pod, report: Report, expected: ExpectedReports | None) -> str:
    if expected is None:
        return ""
    seen, layout = report.topology, expected.layout
    if seen is None:
        return f"{pod.name}: its agent reports no topology yet"
    same = (seen.tensor, seen.pipeline, seen.data, seen.ranks) == (layout.tensor, layout.pipeline, layout.data, layout.ranks)
    if same and expected.expert in (None, seen.expert):
        return ""
    return f"{pod.name}: serves TP{seen.tensor} PP{seen.pipeline} DP{seen.data} EP{seen.expert}, but the spec asks for {layout}" + (
        f" EP{expected.expert}" if expected.expert is not None else ""
    )


def _urgency(pod: Pod) -> tuple[int, int]:
    """Sort key: pods that need manual intervention come first."""
    failed = pod.report is not None and (pod.report.fatal or pod.report.phase == "failed" or not pod.report.healthy)
    return (0 if failed else 1 if pod.waiting or pod.phase == "Failed" else 2, pod.number)


def _state(pod: Pod) -> str:
    report = pod.report
    cause = (report.last_error if report else None) or pod.termination_message
    if report is not None and (report.fatal or report.phase == "failed"):
        return f"container agent failed: {in_words_of_the_spec(cause or 'its agent gives no cause')}"
    if pod.waiting:
        where = "" if pod.waiting.startswith("Unschedulable") else "container agent: "
        return f"{where}{pod.waiting}" + (f"; its last log: {cause}" if cause else "")
    if pod.phase in ("Failed", "Succeeded"):
        return f"ended as {pod.phase}" + (f": {cause}" if cause else "")
    if not pod.scheduled:
        return "is not scheduled yet"
    if pod.report_error:
        return f"its agent's report is rejected: {pod.report_error}"
    if pod.refuses_token:
        return "its agent refuses the operator's token"
    if report is None:
        return "its container starts" if pod.phase == "Pending" else "its agent has not answered yet"
    return ("asleep" if report.asleep else phase_text(report)) + (f"; last error: {report.last_error}" if report.last_error else "")
