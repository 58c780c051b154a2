"""Builds `Observed`, the input of `plan`, from the cache and the agents' reports. Sends no request."""

import time
from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError
from starling_crds.parse import parse_spec
from starling_crds.v1alpha1.status import InferenceServiceStatus

from starling_operator.agents.reports import AgentReports
from starling_operator.agents.routers import RouterReports
from starling_operator.logs import Key
from starling_operator.plan.admin_token import token_of
from starling_operator.plan.observed import LeaderRefusal, Manifest, Observed, Pod, RouterPod, Service, Settings
from starling_operator.plan.pod_report import with_report
from starling_operator.watch.cache import Cache


def observe(
    cache: Cache,
    replies: tuple[AgentReports, RouterReports] | None,
    settings: Settings,
    key: Key,
    operator_key: bytes,
    answers: Mapping[str, LeaderRefusal] | None = None,
    class_name: str = "",
) -> Observed | None:
    """Returns None where this operator has no such service, or where it is being deleted, and its children with it.

    Without `replies` pods have no reports.
    """
    body = cache.service(key)
    if body is None or "deletionTimestamp" in body["metadata"] or class_of(body) != class_name:
        return None
    service, pods, routers = read_service(body), cache.pods(key), cache.routers(key)
    if replies is not None:
        of_agents, of_routers = replies
        pods = tuple(_with_report(pod, key, of_agents) for pod in pods)
        routers = tuple(_with_router_report(pod, of_routers) for pod in routers)
    return Observed(
        service=service,
        children=cache.children(service.uid),
        pods=pods,
        routers=routers,
        answers=answers or {},
        gangs=cache.gangs(),
        settings=settings,
        now=time.time(),
        token=token_of(operator_key, service),
    )


def class_of(body: Manifest) -> str:
    """Returns the class of operators that serve it, as an ingressClassName names a controller."""
    return str((body.get("spec") or {}).get("className") or "")


def read_service(body: Manifest) -> Service:
    """Parses the object. A spec of the wrong form becomes `spec_error`, which the status shows; it stops nothing."""
    metadata = body["metadata"]
    parsed = parse_spec(body.get("spec") or {})
    return Service(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        resource_version=metadata["resourceVersion"],
        spec=parsed.spec,
        spec_error=parsed.error,
        status=_read_status(body.get("status") or {}),
    )


def _read_status(status: Manifest) -> InferenceServiceStatus:
    """Parses the status without fields of a later release. One that cannot be parsed is written again."""
    try:
        return InferenceServiceStatus.model_validate(status, extra="ignore")
    except ValidationError:
        return InferenceServiceStatus()


def _with_report(pod: Pod, key: Key, reports: AgentReports) -> Pod:
    reply = reports.reply(pod.uid)
    return pod if reply is None else with_report(pod, key[1], reply.report, reply.age, reply.error)


def _with_router_report(pod: RouterPod, routers: RouterReports) -> RouterPod:
    reply = routers.reply(pod.uid)
    return pod if reply is None else replace(pod, report=reply.report, report_age=reply.age)
