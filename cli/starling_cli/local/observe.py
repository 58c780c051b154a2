"""State of this machine as input of `plan`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from starling_crds.v1alpha1.scaling import ScalingSpec
from starling_operator.plan.admin_token import token_of
from starling_operator.plan.observed import Manifest, Observed, Pod, Service, Settings
from starling_operator.plan.pod_report import with_report

from starling_cli.local.pod import LocalPod
from starling_cli.local.ports import LOCALHOST
from starling_cli.local.routers import LocalRouter


def observe(
    service: Service,
    children: Mapping[tuple[str, str], Manifest],
    pods: Iterable[LocalPod],
    routers: Sequence[LocalRouter],
    settings: Settings,
    host: str,
    now: float,
    key: bytes,
) -> Observed:
    """Returns the input of `plan`. `key` is this run's, as an operator has one for all services."""
    return Observed(
        service=_of_one_machine(service),
        children={key: _with_status(child, routers) for key, child in children.items()},
        pods=tuple(_with_report(pod, service.name, host, now) for pod in pods),
        settings=settings,
        now=now,
        token=token_of(key, service),
    )


def _of_one_machine(service: Service) -> Service:
    """Asks for no Gateway, for groups that stay, and for one router: several here would only know less of each other's requests.

    Nobody asks it for reports, so a new revision replaces the old one without a canary.
    """
    spec = service.spec
    if spec is None:
        return service
    router = None if spec.router is None else spec.router.model_copy(update={"replicas": 1})
    endpoint = spec.endpoint.model_copy(update={"route": None})
    rollout = spec.rollout.model_copy(update={"canary": None, "pause": False})
    changes = {"router": router, "endpoint": endpoint, "scaling": ScalingSpec(), "rollout": rollout}
    return replace(service, spec=spec.model_copy(update=changes))


def _with_status(child: Manifest, routers: Sequence[LocalRouter]) -> Manifest:
    """Gives the routers' Deployment the counts that its controller would."""
    if child["kind"] != "Deployment":
        return child
    staying = [router for router in routers if router.deleted_at is None]
    updated = sum(router.revision == child["metadata"]["resourceVersion"] for router in staying)
    ready = sum(router.is_ready for router in staying)
    return child | {"status": {"replicas": len(staying), "updatedReplicas": updated, "readyReplicas": ready}}


def _pod(pod: LocalPod, host: str) -> Pod:
    running = pod.pid is not None
    return Pod(
        name=pod.name,
        uid=pod.uid,
        group=pod.group,
        revision=pod.revision,
        number=pod.number,
        cluster_node=host,
        address=LOCALHOST,
        # As with a kubelet, a container that is started again leaves its pod running.
        phase="Running" if running or pod.restarts else "Pending",
        scheduled=True,
        ready=running and pod.report is not None and pod.report.ready,
        created_at=pod.created_at,
        deleted_at=pod.deleted_at,
        restarts=pod.restarts,
        waiting=pod.waiting,
        termination_message=pod.termination_message,
    )


def _with_report(pod: LocalPod, service: str, host: str, now: float) -> Pod:
    age = None if pod.report_at is None else now - pod.report_at
    return with_report(_pod(pod, host), service, pod.report, age)
