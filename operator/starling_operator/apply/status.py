"""Writes the status, if it differs from what is there; adds what the API server refuses, which `plan` cannot know."""

import math
import time
from collections.abc import Sequence

from starling_crds.v1alpha1.status import Condition, ConditionStatus, GroupNode, InferenceServiceStatus

from starling_operator.cluster.kinds import BY_NAME, INFERENCE_SERVICE
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.logs import Key
from starling_operator.plan.clock import rfc3339
from starling_operator.plan.conditions import SETTLED
from starling_operator.plan.decision import Event
from starling_operator.plan.observed import Manifest, Service
from starling_operator.watch.cache import Cache

REFUSED = "ApplyFailed"
_LONGEST = 4000
PERIOD = 1.0


async def write_status(kube: Kube, cache: Cache, service: Service, status: InferenceServiceStatus, *, over_seen: bool) -> bool:
    """Whether anything was written. `over_seen`: only over the very version that `service` was read from."""
    wanted = _without_empty(status.model_dump(mode="json", by_alias=True, exclude_none=True))
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
    except KubeError as error:
        if error.status in (404, 409):
            return False  # The service is gone, or another version by now; the watch will tell.
        raise
    cache.put(INFERENCE_SERVICE, written)
    return True


class StatusThrottle:
    """At most one write of a service's status a second, unless it tells something new: progress comes many times a second."""

    def __init__(self) -> None:
        self._written: dict[Key, float] = {}

    def wait(self, key: Key, old: InferenceServiceStatus, new: InferenceServiceStatus) -> float:
        """Seconds until `new` may be written."""
        left = self._written.get(key, -math.inf) + PERIOD - time.monotonic()
        return 0.0 if left <= 0 or _substance(old) != _substance(new) else left

    def wrote(self, key: Key) -> None:
        self._written[key] = time.monotonic()

    def forget(self, key: Key) -> None:
        self._written.pop(key, None)


def _substance(status: InferenceServiceStatus) -> InferenceServiceStatus:
    """Without how far pods have come, and what is said of it."""
    conditions = [condition.model_copy(update={"message": "", "last_transition_time": ""}) for condition in status.conditions]
    nodes = {group.name: [_node_substance(node) for node in group.nodes] for group in status.groups}
    groups = [group.model_copy(update={"message": "", "progressed_at": "", "nodes": nodes[group.name]}) for group in status.groups]
    return status.model_copy(update={"conditions": conditions, "groups": groups})


def _node_substance(node: GroupNode) -> GroupNode:
    return node.model_copy(update={"phase": "", "progress": ""})


def _without_empty(wanted: Manifest) -> Manifest:
    """Of the status and its groups, fields that have nothing to say; conditions have all theirs."""
    groups = [_few({**group, "nodes": [_full(node) for node in group["nodes"]]}) for group in wanted["groups"]]
    return _full({**wanted, "revision": _full(wanted["revision"]), "groups": groups})


def _few(group: Manifest) -> Manifest:
    """There may be a thousand: what is 0 or False is left out as well, but for what a reader looks for."""
    return {name: value for name, value in group.items() if value or name in ("index", "ready")}


def _full(fields: Manifest) -> Manifest:
    return {name: value for name, value in fields.items() if value not in ("", [], {})}


async def write_child_status(kube: Kube, cache: Cache, service: Service, wanted: Manifest) -> bool:
    """The status of one child, if it differs. Whether anything was written."""
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
    """Stalled with the API server's own words: what is refused stays refused until somebody changes something."""
    if not errors:
        return status
    message = "; ".join(errors)[:_LONGEST]
    said: dict[str, tuple[ConditionStatus, str, str]] = {
        "Ready": ("False", REFUSED, message),
        "Reconciling": ("False", *SETTLED),
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
