"""Joins pods with their agents' reports. A report counts only if it names the pod that was polled.

An address may belong to another pod by now, and a pod may report anything.
"""

from dataclasses import replace

from starling_agent.contract.report import Report

from starling_operator.plan.observed import Pod

TOKEN_REFUSED = "it refuses the operator's token"


def with_report(pod: Pod, service: str, report: Report | None, age: float | None, error: str = "") -> Pod:
    """Returns the pod with its agent's report, unless that is of another pod. `error`: why an answer was no report."""
    if report is not None:
        error = report_mismatch(pod, service, report)
    if error == TOKEN_REFUSED:
        # It may serve as before: its probes say so.
        return replace(pod, report_age=age, refuses_token=True)
    believed = None if error else report
    drains = pod.drains or _drains_with_its_node(pod, believed)
    return replace(pod, report=believed, report_age=age, report_error=error, drains=drains)


def report_mismatch(pod: Pod, service: str, report: Report) -> str:
    """Returns the first field by which a report is of another pod; "" if it is of this one."""
    expected = {"service": service, "group": pod.group, "revision": pod.revision, "pod": pod.name, "node": pod.number}
    for name, value in expected.items():
        reported = getattr(report, name)
        if reported != value:
            return f"its report is of another {name} ({str(reported)[:60]!r}, not {value!r})"
    return ""


def _drains_with_its_node(pod: Pod, report: Report | None) -> bool:
    """True if the kubelet ends the pod because its node shuts down. Nobody deletes the pod, so only its agent shows it."""
    return report is not None and report.phase == "draining" and pod.phase == "Running" and pod.deleted_at is None
