"""Writes the status where it differs; adds the API server's refusals, which `plan` cannot know."""

import math
import time
from collections.abc import Sequence

from starling_crds.v1alpha1.status import Condition, ConditionStatus, InferenceServiceStatus

from starling_operator.cluster.kinds import BY_NAME, INFERENCE_SERVICE
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.logs import Key
from starling_operator.plan.conditions import SETTLED
from starling_operator.plan.decision import Decision, Event
from starling_operator.plan.events import CREATED, condition_events
from starling_operator.plan.observed import Manifest, Service
from starling_operator.plan.timestamps import rfc3339
from starling_operator.watch.cache import Cache

REFUSED = "ApplyFailed"
_LONGEST = 4000
PERIOD = 1.0


async def write_status(kube: Kube, cache: Cache, service: Service, status: InferenceServiceStatus, *, if_unchanged: bool) -> bool:
    """Returns whether anything was written. `if_unchanged`: only over the version that `service` was read from."""
    wanted = _without_empty(status.model_dump(mode="json", by_alias=True, exclude_none=True))
    live = cache.service((service.namespace, service.name))
    if live is None or live.get("status") == wanted:
        return False
    # The UID makes the write fail if another service has the name by now.
    metadata = {"name": service.name, "namespace": service.namespace, "uid": service.uid}
    if if_unchanged:
        metadata["resourceVersion"] = service.resource_version
    body: Manifest = {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.name,
        "metadata": metadata,
        "status": wanted,
    }
    try:
        written = await kube.apply(INFERENCE_SERVICE.path(service.namespace, service.name, "status"), body)
    except KubeError as error:
        if error.status in (404, 409):
            return False  # The service is gone, or another version by now; its watch shows that.
        raise
    cache.put(INFERENCE_SERVICE, written)
    return True


class StatusThrottle:
    """Limits writes that only show more of the pods to one a second for each service: a start has news of them many times a second.

    What a reader waits for is written at once: conditions, the canary and the scale. So is what the next decision has to know:
    groups that go, pods that go or restart, operations.
    """

    def __init__(self) -> None:
        self._written: dict[Key, float] = {}

    def wait(self, key: Key, old: InferenceServiceStatus, decision: Decision, new: InferenceServiceStatus) -> float:
        """Returns the seconds until `new` may be written, and the events of the decision posted."""
        left = self._written.get(key, -math.inf) + PERIOD - time.monotonic()
        if left <= 0:
            return 0.0
        acts = decision.begins_operation or decision.delete or any(event.reason != CREATED for event in decision.events)
        at_once = acts or _news(old) != _news(new) or not _pods(old, new) <= _pods(new, new)
        return 0.0 if at_once else left

    def record(self, key: Key) -> None:
        self._written[key] = time.monotonic()

    def forget(self, key: Key) -> None:
        self._written.pop(key, None)


def _news(status: InferenceServiceStatus) -> tuple[object, ...]:
    """Returns what is written at once where it differs."""
    conditions = [(each.type, each.status, each.reason, each.observed_generation) for each in status.conditions]
    of_groups = {group.name: (group.operation, group.restarted_at) for group in status.groups if group.operation or group.restarts}
    of_service = (status.observed_generation, status.revision, status.canary, status.scaling, status.gang_released_at)
    return *of_service, conditions, of_groups


def _pods(status: InferenceServiceStatus, shown: InferenceServiceStatus) -> set[tuple[str, str, int]]:
    """Returns the groups of a status, and pods with their restarts, of those groups of which `shown` has pods."""
    detailed = {group.name for group in shown.groups if group.nodes}
    pods = {(group.name, node.uid, node.restarts) for group in status.groups if group.name in detailed for node in group.nodes}
    return pods | {(group.name, "", 0) for group in status.groups}


def _without_empty(wanted: Manifest) -> Manifest:
    """Drops empty fields of the status and its groups; conditions keep all of theirs."""
    groups = [
        _without_defaults({**group, "nodes": [_without_blanks(node) for node in group["nodes"]]}) for group in wanted["groups"]
    ]
    return _without_blanks({**wanted, "revision": _without_blanks(wanted["revision"]), "groups": groups})


def _without_defaults(group: Manifest) -> Manifest:
    """Drops 0 and False too, but for two fields that readers look for: there may be a thousand groups."""
    return {name: value for name, value in group.items() if value or name in ("index", "ready")}


def _without_blanks(fields: Manifest) -> Manifest:
    return {name: value for name, value in fields.items() if value not in ("", [], {})}


async def write_child_status(kube: Kube, cache: Cache, service: Service, wanted: Manifest) -> bool:
    """Writes the status of one child where it differs. Returns whether anything was written."""
    kind, metadata = BY_NAME[wanted["kind"]], wanted["metadata"]
    live = cache.children(service.uid).get((kind.name, metadata["name"]))
    if live is None or live["metadata"]["uid"] != metadata["uid"] or live.get("status") == wanted["status"]:
        return False
    try:
        written = await kube.apply(kind.path(metadata["namespace"], metadata["name"], "status"), wanted)
    except KubeError as error:
        if error.status in (404, 409):
            return False
        raise
    cache.put(kind, written)
    return True


def with_refusals(service: Service, status: InferenceServiceStatus, errors: Sequence[str]) -> InferenceServiceStatus:
    """Returns the status as Stalled, with the API server's messages: a refusal stays until somebody changes something."""
    if not errors:
        return status
    message = "; ".join(errors)[:_LONGEST]
    changes: dict[str, tuple[ConditionStatus, str, str]] = {
        "Ready": ("False", REFUSED, message),
        "Reconciling": ("False", *SETTLED),
        "Stalled": ("True", REFUSED, message),
    }
    old = {condition.type: condition for condition in service.status.conditions}
    conditions = [
        _restated(condition, *changes[condition.type], old.get(condition.type)) if condition.type in changes else condition
        for condition in status.conditions
    ]
    return status.model_copy(update={"conditions": conditions})


def events_of(service: Service, decision: Decision, errors: Sequence[str]) -> tuple[Event, ...]:
    """Returns the events of the status that is written: the conditions that refusals replace have none."""
    if not errors:
        return decision.events
    replaced = condition_events(service.status, decision.status)
    return (*(event for event in decision.events if event not in replaced), *_refusal_events(service, errors))


def _refusal_events(service: Service, errors: Sequence[str]) -> tuple[Event, ...]:
    """Returns one event for each new message."""
    message = "; ".join(errors)[:_LONGEST]
    stalled = next((condition for condition in service.status.conditions if condition.type == "Stalled"), None)
    if stalled is not None and (stalled.reason, stalled.message) == (REFUSED, message):
        return ()
    return (Event("Warning", REFUSED, message),)


def _restated(condition: Condition, status: ConditionStatus, reason: str, message: str, old: Condition | None) -> Condition:
    same = old is not None and old.status == status
    since = old.last_transition_time if same and old is not None else rfc3339(time.time())
    return condition.model_copy(update={"status": status, "reason": reason, "message": message, "last_transition_time": since})
