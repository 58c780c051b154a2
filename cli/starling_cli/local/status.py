"""Status that `starling up` displays, as plain values: made of the plan's status and the pods."""

from collections.abc import Sequence
from dataclasses import dataclass

from starling_agent.contract.report import Progress
from starling_crds.v1alpha1.status import Condition, InferenceServiceStatus

from starling_cli.local.pod import LocalPod
from starling_cli.local.routers import LocalRouter


@dataclass(frozen=True)
class PodRow:
    """One pod."""

    pod: str
    phase: str
    progress: str
    ready: bool
    restarts: int
    streams: int
    port: int
    message: str


@dataclass(frozen=True)
class LocalStatus:
    """Status of the service on this machine. `trouble` says why the manifest on disk cannot be used."""

    service: str
    model: str
    url: str
    ready: bool
    available: bool
    reason: str
    message: str
    stalled: bool
    groups: str
    rows: tuple[PodRow, ...]
    trouble: str = ""
    stopping: bool = False

    @property
    def headline(self) -> str:
        if self.stopping:
            return "draining"
        if self.ready:
            return f"ready at {self.url}"
        text = f"{'serving, not ready' if self.available else 'not ready'}: {self.reason} {self.message}"
        return " ".join(text.split())


def local_status(
    *,
    service: str,
    model: str,
    url: str,
    status: InferenceServiceStatus,
    wanted: int,
    pods: Sequence[LocalPod],
    routers: Sequence[LocalRouter],
    trouble: str,
    stopping: bool,
) -> LocalStatus:
    ready, stalled, available = (_condition(status, name) for name in ("Ready", "Stalled", "Available"))
    return LocalStatus(
        service=service,
        model=model,
        url=url,
        ready=ready.status == "True",
        available=available.status == "True",
        reason=(stalled if stalled.status == "True" else ready).reason,
        message=(stalled if stalled.status == "True" else ready).message,
        stalled=stalled.status == "True",
        groups=f"{status.ready_replicas}/{wanted}",
        rows=tuple(_row(pod) for pod in sorted((*pods, *routers), key=lambda pod: pod.name)),
        trouble=trouble,
        stopping=stopping,
    )


def _condition(status: InferenceServiceStatus, name: str) -> Condition:
    missing = Condition(type=name, status="Unknown", reason="")
    return next((entry for entry in status.conditions if entry.type == name), missing)


def _row(pod: LocalPod) -> PodRow:
    report = pod.report
    return PodRow(
        pod=pod.name,
        phase=_phase(pod),
        progress=describe_progress(report.progress) if report and report.progress else "",
        ready=pod.is_ready,
        restarts=pod.restarts + (report.engine_restarts if report else 0),
        streams=report.open_streams if report else 0,
        port=pod.endpoint_port,
        message=(report.last_error if report and report.last_error else pod.waiting) or "",
    )


def _phase(pod: LocalPod) -> str:
    if pod.report is not None:
        return "draining" if pod.deleted_at is not None else pod.report.phase
    if pod.deleted_at is not None:
        return "ending"
    if pod.is_ready:
        return "serving"
    return "starting" if pod.pid is not None else "waiting"


def describe_progress(progress: Progress) -> str:
    """Returns a text like `3.2/7.6 GB, about 40 s left`."""
    if progress.unit == "bytes":
        unit, size = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6)) if progress.total >= s), ("kB", 1e3))
        text = f"{progress.done / size:.1f}/{progress.total / size:.1f} {unit}"
    else:
        text = f"{progress.done}/{progress.total} {progress.unit}"
    return text if progress.eta_seconds is None else f"{text}, about {progress.eta_seconds:.0f} s left"
