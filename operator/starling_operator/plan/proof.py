"""Whether a group serves what the spec asks for, as its agents themselves report it; and if not, why not, in words."""

from dataclasses import dataclass, replace

from starling_agent.contract.report import Report
from starling_crds.layout import GroupLayout, group_layout, with_data
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.elastic.desired import Desired
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.progress import progress_text
from starling_operator.plan.revision import Revision

LOADED = frozenset({"warming", "serving", "draining"})


@dataclass(frozen=True, slots=True)
class ExpectedReports:
    """What the agents of the target revision have to report.

    expert            None where the spec leaves it to the model
    commit            of the hub's repository, and weights: the digest of the files that most agents have; None while unknown
    through_service   a token has to have come through the Service, not only through each pod's own endpoint
    """

    config_hash: str
    layout: GroupLayout
    expert: int | None = None
    commit: str | None = None
    weights: str | None = None
    through_service: bool = False


def asked_of(spec: InferenceServiceSpec, target: Revision, desired: Desired | None = None) -> ExpectedReports:
    layout, expert = group_layout(spec.parallelism, spec.accelerators.per_node), spec.parallelism.expert
    if desired is not None:
        layout = with_data(layout, desired.data)
        expert = layout.expert if expert is not None else None
    return ExpectedReports(target.config_hash, layout, expert, through_service=target.has_service)


def unproven(group: Group, asked: ExpectedReports) -> str:
    """Why the group does not count as ready; "" if it does."""
    if not group.target:
        return "" if group.available else waits_for(group)
    if len(group.serving) != group.needed or not all(pod.ready for pod in group.serving):
        return waits_for(group)
    if group.sizing is not None and not group.sizing.effective and not group.believed:
        return waits_for(group) or f"{group.name}: it has no size yet"
    return next(filter(None, (_pod_unproven(pod, asked, group) for pod in group.serving)), "")


def is_whole(group: Group, asked: ExpectedReports) -> bool:
    """Whether an elastic group has come to the size that is wanted: all its pods serve it, and there are no others."""
    pods, wanted = group.live, asked.layout.nodes
    return (
        len(pods) == group.nodes == wanted
        and all(pod.ready for pod in pods)
        and all(not _pod_unproven(pod, asked, group) for pod in pods)
        and all(pod.report is None or not _topology_differs(pod, pod.report, asked) for pod in pods)
    )


def waits_for(group: Group) -> str:
    """The pod that keeps the group from serving, and its cause. The worst one first."""
    if group.refused:
        return f"{group.name}: {len(group.missing)} of {group.nodes} pods are not made: {group.refused}"
    for pod in sorted(group.live, key=_trouble):
        if not pod.ready or pod.waiting:
            return pod_message(pod)
    going = [pod for pod in group.pods if pod not in group.live]
    if going:
        return f"{going[0].name}: " + (f"its node {going[0].host} is gone" if going[0].lost else "is being deleted")
    missing = group.nodes - len(group.live)
    if missing > 0:
        return f"{group.name}: {missing} of {group.nodes} pods are still to be made"
    return ""


def pod_message(pod: Pod) -> str:
    """One pod in one line: what it does or waits for, the agent's own words where it has any."""
    return f"{pod.name}: {_state(pod)}"


def phase_text(report: Report) -> str:
    """downloading 3.2/7.6 GB, about 40 s left."""
    parts = " ".join(filter(None, (report.phase, progress_text(report.progress))))
    eta = report.progress.eta_seconds if report.progress else None
    return parts if eta is None else f"{parts}, about {max(1, round(eta))} s left"


def loaded(group: Group) -> bool:
    """All its agents have the model in memory."""
    return len(group.members) == group.gang and all(
        (pod.report is not None and pod.report.phase in LOADED) or (pod.report is None and group.believed and not pod.report_error)
        for pod in group.members
    )


def _pod_unproven(pod: Pod, asked: ExpectedReports, group: Group) -> str:
    report = pod.report
    if pod.unlabelled:
        return f"{pod.name}: it lost its labels, so that no requests come to it; it is replaced"
    if pod.report_error:
        return pod_message(pod)
    if report is None:
        return "" if group.believed else pod_message(pod) if pod.refuses_token else f"{pod.name}: its agent has not reported yet"
    if report.phase != "serving" or not report.ready or not report.healthy:
        return pod_message(pod)
    if report.config_hash != asked.config_hash:
        return f"{pod.name}: its agent runs another configuration than the revision's ({report.config_hash[:12]})"
    if not report.token_seen:
        return f"{pod.name}: no token came through its endpoint yet"
    if report.service_token_seen is False or (asked.through_service and not report.service_token_seen):
        return f"{pod.name}: no token came through the Service yet" + (f": {report.last_error}" if report.last_error else "")
    return _weights_differ(pod, report, asked) or _topology_differs(pod, report, _asked_now(group, asked))


def _weights_differ(pod: Pod, report: Report, asked: ExpectedReports) -> str:
    """Agents of earlier releases report neither."""
    if asked.commit and report.commit and report.commit != asked.commit:
        return f"{pod.name}: serves commit {report.commit[:12]} of the model, but its revision is pinned to {asked.commit[:12]}"
    if asked.weights and report.weights and report.weights != asked.weights:
        return (
            f"{pod.name}: serves other weights ({report.weights[:12]}) than the other pods of its revision ({asked.weights[:12]}); "
            "model.source must hold the same files on each node"
        )
    return ""


def _asked_now(group: Group, asked: ExpectedReports) -> ExpectedReports | None:
    """With a group's present size. None while that changes: it serves, and its nodes hear of a commit one after the other."""
    sizing = group.sizing
    if sizing is None:
        return asked
    if sizing.is_changing or not sizing.effective:
        return None
    layout = with_data(asked.layout, sizing.effective)
    return replace(asked, layout=layout, expert=layout.expert if asked.expert is not None else None)


def _topology_differs(pod: Pod, report: Report, asked: ExpectedReports | None) -> str:
    if asked is None:
        return ""
    seen, layout = report.topology, asked.layout
    if seen is None:
        return f"{pod.name}: its agent reports no topology yet"
    same = (seen.tensor, seen.pipeline, seen.data, seen.ranks) == (layout.tensor, layout.pipeline, layout.data, layout.ranks)
    if same and asked.expert in (None, seen.expert):
        return ""
    return f"{pod.name}: serves TP{seen.tensor} PP{seen.pipeline} DP{seen.data} EP{seen.expert}, but the spec asks for {layout}" + (
        f" EP{asked.expert}" if asked.expert is not None else ""
    )


def _trouble(pod: Pod) -> tuple[int, int]:
    """Sorts what a person has to look at to the front."""
    failed = pod.report is not None and (pod.report.fatal or pod.report.phase == "failed" or not pod.report.healthy)
    return (0 if failed else 1 if pod.waiting or pod.phase == "Failed" else 2, pod.number)


def _state(pod: Pod) -> str:
    report = pod.report
    own = (report.last_error if report else None) or pod.last_log
    if report is not None and (report.fatal or report.phase == "failed"):
        return f"container agent failed: {own or 'its agent gives no cause'}"
    if pod.waiting:
        where = "" if pod.waiting.startswith("Unschedulable") else "container agent: "
        return f"{where}{pod.waiting}" + (f"; its last words: {own}" if own else "")
    if pod.phase in ("Failed", "Succeeded"):
        return f"ended as {pod.phase}" + (f": {own}" if own else "")
    if not pod.scheduled:
        return "waits for a node"
    if pod.report_error:
        return f"its agent is not believed: {pod.report_error}"
    if pod.refuses_token:
        return "its agent refuses the operator's token"
    if report is None:
        return "its container starts" if pod.phase == "Pending" else "its agent has not answered yet"
    return phase_text(report) + (f"; last error: {report.last_error}" if report.last_error else "")
