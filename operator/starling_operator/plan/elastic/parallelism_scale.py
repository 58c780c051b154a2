"""The ParallelismScale of a service, which autoscalers write and read."""

from typing import Any

from starling_crds.manifest import SCALE_KIND
from starling_crds.v1alpha1.scale import ParallelismScaleStatus
from starling_crds.v1alpha1.status import Condition, ConditionStatus

from starling_operator.plan import labels
from starling_operator.plan.decision import Delete
from starling_operator.plan.elastic.desired import TAKEN, Desired, live_scale
from starling_operator.plan.manifest import child
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.timestamps import rfc3339


def scale_child(observed: Observed, desired: Desired) -> Manifest:
    """Makes the object with the size that it has, or with the InferenceService's if that was edited since."""
    made = child(observed.service, labels.API_VERSION, SCALE_KIND, observed.service.name)
    made["metadata"]["annotations"] = {TAKEN: desired.taken}
    return made | {"spec": {"replicas": desired.requested}}


def scale_deletion(observed: Observed, desired: Desired | None) -> tuple[Delete, ...]:
    """Deletes the object of a service without elastic bounds."""
    live = live_scale(observed)
    if live is None or desired is not None:
        return ()
    return (Delete(SCALE_KIND, live["metadata"]["name"], live["metadata"].get("uid", ""), why="the service is no longer elastic"),)


def scale_status(observed: Observed, desired: Desired, effective: int, ready: Condition) -> Manifest | None:
    """Returns its status, or None without an object. `effective`: size at which all groups serve, in data parallel ranks."""
    live = live_scale(observed)
    if live is None:
        return None
    status = ParallelismScaleStatus(
        observed_generation=int(live["metadata"].get("generation", 0)),
        replicas=effective * desired.each,
        selector=labels.serving_selector_text(observed.service),
        unit=desired.unit,
        target=desired.units,
        conditions=[
            _condition(live, observed, "Ready", ready.status == "True", ready.reason, ready.message),
            _condition(live, observed, "Rounded", bool(desired.rounded), *_rounding(desired)),
        ],
    )
    head = {key: live[key] for key in ("apiVersion", "kind")}
    metadata = {key: live["metadata"].get(key, "") for key in ("name", "namespace", "uid")}
    return {**head, "metadata": metadata, "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}


def _rounding(desired: Desired) -> tuple[str, str]:
    """Returns reason and message of the condition Rounded."""
    if desired.rounded:
        return "NoSuchSize", desired.rounded
    return "AsAsked", f"{desired.requested} is a size that groups can have"


def _condition(live: Manifest, observed: Observed, kind: str, true: bool, reason: str, message: str) -> Condition:
    """Keeps the time of a condition whose status is the same."""
    value: ConditionStatus = "True" if true else "False"
    old: list[dict[str, Any]] = (live.get("status") or {}).get("conditions") or []
    same = next((each for each in old if each["type"] == kind and each["status"] == value), {})
    return Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message,
        observed_generation=int(live["metadata"].get("generation", 0)),
        last_transition_time=same.get("lastTransitionTime") or rfc3339(observed.now),
    )
