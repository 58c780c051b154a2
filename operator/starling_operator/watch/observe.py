"""From what the watches and the agents have shown to what `plan` decides from. Asks nobody anything."""

import time
from collections.abc import Mapping

from pydantic import ValidationError
from starling_crds.parse import parse_spec
from starling_crds.v1alpha1.status import InferenceServiceStatus

from starling_operator.agents.reports import AgentReports
from starling_operator.logs import Key
from starling_operator.plan.belief import with_report
from starling_operator.plan.observed import LeaderAnswer, Manifest, Observed, Pod, Service, Settings
from starling_operator.plan.token import token_of
from starling_operator.watch.cache import Cache


def observe(
    cache: Cache,
    reports: AgentReports,
    settings: Settings,
    key: Key,
    operator_key: bytes,
    answers: Mapping[str, LeaderAnswer] | None = None,
    class_name: str = "",
) -> Observed | None:
    """None: there is no such service for this operator, or it is being deleted, and its children go with it."""
    body = cache.service(key)
    if body is None or "deletionTimestamp" in body["metadata"] or class_of(body) != class_name:
        return None
    service = read_service(body)
    return Observed(
        service=service,
        children=cache.children(service.uid),
        pods=tuple(_with_report(pod, key, reports) for pod in cache.pods(key)),
        answers=answers or {},
        gangs=cache.gangs(),
        settings=settings,
        now=time.time(),
        token=token_of(operator_key, service),
    )


def class_of(body: Manifest) -> str:
    """Which operator serves it, as an ingressClassName tells which controller does."""
    return str((body.get("spec") or {}).get("className") or "")


def read_service(body: Manifest) -> Service:
    """A spec that cannot be read is told in the status, by its field; it does not stop the operator."""
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
    """Fields of a later release are left alone; a status that cannot be read at all is written anew."""
    try:
        return InferenceServiceStatus.model_validate(status, extra="ignore")
    except ValidationError:
        return InferenceServiceStatus()


def _with_report(pod: Pod, key: Key, reports: AgentReports) -> Pod:
    heard = reports.of(pod.uid)
    return pod if heard is None else with_report(pod, key[1], heard.report, heard.age, heard.error)
