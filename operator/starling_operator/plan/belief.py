"""Whether a report is of the pod that was asked: addresses are given to other pods, and a pod may say what it likes."""

from dataclasses import replace

from starling_agent.contract.report import Report

from starling_operator.plan.observed import Pod

TOKEN_REFUSED = "it refuses the operator's token"


def with_report(pod: Pod, service: str, report: Report | None, age: float | None, error: str = "") -> Pod:
    """The pod with its agent's report. One of somebody else is left out; `error`: why there is none, if the agent did answer."""
    if report is not None:
        error = disbelief(pod, service, report)
    if error == TOKEN_REFUSED:
        # It may serve as before: its probes tell.
        return replace(pod, report_age=age, refuses_token=True)
    believed = None if error else report
    return replace(pod, report=believed, report_age=age, report_error=error, drains=pod.drains or _is_told_to_go(pod, believed))


def _is_told_to_go(pod: Pod, report: Report | None) -> bool:
    """By its kubelet, whose node shuts down: until the pod has ended only its agent says so, for nobody deletes it."""
    return report is not None and report.phase == "draining" and pod.phase == "Running" and pod.deleted_at is None


def disbelief(pod: Pod, service: str, report: Report) -> str:
    """Why a report is not this pod's; "" if it is."""
    own = {"service": service, "group": pod.group, "revision": pod.revision, "pod": pod.name, "node": pod.number}
    for name, value in own.items():
        said = getattr(report, name)
        if said != value:
            return f"its report is of another {name} ({str(said)[:60]!r}, not {value!r})"
    return ""
