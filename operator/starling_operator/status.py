"""Writes the status, if it differs from what is there; adds what the API server refuses, which `plan` cannot know."""

import time
from collections.abc import Sequence

from starling_crds.v1alpha1.status import Condition, ConditionStatus, InferenceServiceStatus

from starling_operator.cache import Cache
from starling_operator.kinds import BY_NAME, INFERENCE_SERVICE
from starling_operator.kube import ApiError, Kube
from starling_operator.plan.clock import rfc3339
from starling_operator.plan.decision import Event
from starling_operator.plan.observed import Manifest, Service

REFUSED = "ApplyFailed"
_LONGEST = 4000


async def write_status(kube: Kube, cache: Cache, service: Service, status: InferenceServiceStatus, *, over_seen: bool) -> bool:
    """Whether anything was written. `over_seen`: only over the very version that `service` was read from."""
    wanted = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    live = cache.service((service.namespace, service.name))
    if live is None or live.get("status") == wanted:
        return False
    # The UID makes the write fail if another service has the name by now.
    metadata = {"name": service.name, "namespace": service.namespace, "uid": service.uid}
    if over_seen:
        metadata["resourceVersion"] = service.resource_version
    body: Manifest = {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.name,
        "metadata": metadata,
        "status": wanted,
    }
    try:
        written = await kube.apply(INFERENCE_SERVICE.path(service.namespace, service.name, "status"), body)
    except ApiError as error:
        if error.status in (404, 409):
            return False  # The service is gone, or another version by now; the watch will tell.
        raise
    cache.put(INFERENCE_SERVICE, written)
    return True


async def write_child_status(kube: Kube, cache: Cache, service: Service, wanted: Manifest) -> bool:
    """The status of one child, if it differs. Whether anything was written."""
    kind, metadata = BY_NAME[wanted["kind"]], wanted["metadata"]
    live = cache.children(service.uid).get((kind.name, metadata["name"]))
    if live is None or live["metadata"]["uid"] != metadata["uid"] or live.get("status") == wanted["status"]:
        return False
    try:
        written = await kube.apply(kind.path(metadata["namespace"], metadata["name"], "status"), wanted)
    except ApiError as error:
        if error.status in (404, 409):
            return False
        raise
    cache.put(kind, written)
    return True


def with_refusals(service: Service, status: InferenceServiceStatus, errors: Sequence[str]) -> InferenceServiceStatus:
    """Stalled with the API server's own words: what is refused stays refused until somebody changes something."""
    if not errors:
        return status
    message = "; ".join(errors)[:_LONGEST]
    said: dict[str, tuple[ConditionStatus, str, str]] = {
        "Ready": ("False", REFUSED, message),
        "Reconciling": ("False", "Settled", ""),
        "Stalled": ("True", REFUSED, message),
    }
    old = {condition.type: condition for condition in service.status.conditions}
    conditions = [
        _restated(condition, *said[condition.type], old.get(condition.type)) if condition.type in said else condition
        for condition in status.conditions
    ]
    return status.model_copy(update={"conditions": conditions})


def refusal_events(service: Service, errors: Sequence[str]) -> tuple[Event, ...]:
    """Told once for each message."""
    message = "; ".join(errors)[:_LONGEST]
    stalled = next((condition for condition in service.status.conditions if condition.type == "Stalled"), None)
    if not errors or (stalled is not None and (stalled.reason, stalled.message) == (REFUSED, message)):
        return ()
    return (Event("Warning", REFUSED, message),)


def _restated(condition: Condition, status: ConditionStatus, reason: str, message: str, old: Condition | None) -> Condition:
    same = old is not None and old.status == status
    since = old.last_transition_time if same and old is not None else rfc3339(time.time())
    return condition.model_copy(update={"status": status, "reason": reason, "message": message, "last_transition_time": since})
