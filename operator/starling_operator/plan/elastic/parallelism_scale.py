"""The ParallelismScale of a service, and the wanted size of the service's groups, which it owns.

An autoscaler or `kubectl scale` writes its spec.replicas. It begins with the size of the InferenceService, and takes that again
whenever it is edited. An annotation holds the size that was taken last, so the last writer wins.
"""

from dataclasses import dataclass
from typing import Any

from starling_crds.manifest import SCALE_KIND
from starling_crds.spec_layout import elastic_sizes
from starling_crds.v1alpha1.scale import ParallelismScaleStatus
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import Condition, ConditionStatus

from starling_operator.plan import labels
from starling_operator.plan.decision import Delete, deletion
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.timestamps import rfc3339

TAKEN = "serving.starling.dev/taken-from-spec"


@dataclass(frozen=True, slots=True)
class Desired:
    """Wanted size, and where it comes from.

    data        size in data parallel ranks, one that a group can have
    requested   size that was requested, in units
    unit        "expert" or "data", as the spec gives it
    each        units of one data parallel rank
    rounded     why `data` is another size than requested; "" if it is not
    taken       the InferenceService's size, as the annotation holds it
    """

    data: int
    requested: int
    unit: str
    each: int
    rounded: str
    taken: str

    @property
    def units(self) -> int:
        return self.data * self.each


def desired_size(observed: Observed, spec: InferenceServiceSpec) -> Desired | None:
    """Returns None if the service is not elastic."""
    split = spec.parallelism
    if split.elastic is None:
        return None
    unit, given, each = ("expert", split.expert, split.tensor) if split.expert is not None else ("data", split.data or 1, 1)
    taken = f"{unit}={given}"
    requested = _requested(live_scale(observed), taken, given)
    data, rounded = _possible_size(requested, spec, unit, each)
    return Desired(data, requested, unit, each, rounded, taken)


def live_scale(observed: Observed) -> Manifest | None:
    """Returns the service's ParallelismScale; None if there is none, or it is being deleted."""
    return observed.live(SCALE_KIND, observed.service.name)


def _requested(live: Manifest | None, taken: str, given: int) -> int:
    if live is None or (live["metadata"].get("annotations") or {}).get(TAKEN) != taken:
        return given
    return int(live["spec"].get("replicas", given))


def _possible_size(requested: int, spec: InferenceServiceSpec, unit: str, each: int) -> tuple[int, str]:
    """Returns the smallest possible size that is not below the requested one, or the largest; and why it differs."""
    sizes = elastic_sizes(spec.parallelism, spec.accelerators.per_node)
    data = next((size for size in sizes if size * each >= requested), sizes[-1])
    if data * each == requested:
        return data, ""
    possible = ", ".join(str(size * each) for size in sizes[:16]) + (", ..." if len(sizes) > 16 else "")
    return data, f"spec.replicas: no group can have {requested}, so it is {data * each}; possible for {unit} are {possible}"


# ---- the object ----


def scale_child(observed: Observed, desired: Desired) -> Manifest:
    """Makes the object with the size that it has, or with the InferenceService's if that was edited since."""
    made = child(observed.service, labels.API_VERSION, SCALE_KIND, observed.service.name)
    made["metadata"]["annotations"] = {TAKEN: desired.taken}
    return made | {"spec": {"replicas": desired.requested}}


def scale_deletion(observed: Observed, desired: Desired | None) -> tuple[Delete, ...]:
    """Deletes the object of a service without elastic bounds."""
    if desired is not None:
        return ()
    return tuple(deletion(observed, SCALE_KIND, observed.service.name, "the service is no longer elastic"))


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
