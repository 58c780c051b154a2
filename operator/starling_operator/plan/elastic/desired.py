"""Wanted size of the groups of an elastic service.

The ParallelismScale owns it: an autoscaler or `kubectl scale` writes its spec.replicas. It begins with the size of the
InferenceService, and takes that again whenever it is edited. An annotation holds the size that was taken last, so the last writer
wins.
"""

from dataclasses import dataclass

from starling_crds.manifest import SCALE_KIND
from starling_crds.spec_layout import elastic_sizes
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.observed import Manifest, Observed

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
    live = observed.children.get((SCALE_KIND, observed.service.name))
    return None if live is None or live["metadata"].get("deletionTimestamp") else live


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
