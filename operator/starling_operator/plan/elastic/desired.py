"""Which size the groups of an elastic service are to have, and who says so.

The ParallelismScale owns it: an autoscaler or `kubectl scale` writes its spec.replicas. It is made with the size of the
InferenceService, and takes that again whenever the InferenceService's own size is edited; an annotation remembers the one that was
taken last, so the last writer wins.
"""

from dataclasses import dataclass

from starling_crds.layout import elastic_sizes
from starling_crds.manifest import SCALE_KIND
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.observed import Manifest, Observed

TAKEN = "serving.starling.dev/taken-from-spec"


@dataclass(frozen=True, slots=True)
class Desired:
    """data      the size in data parallel ranks, one that a group can have
    asked     what was asked for, in units
    unit      "expert" or "data", as the spec gives it
    each      units of one data parallel rank
    rounded   why `data` is another size than asked; "" if it is not
    taken     the InferenceService's size, as the annotation holds it
    """

    data: int
    asked: int
    unit: str
    each: int
    rounded: str
    taken: str

    @property
    def units(self) -> int:
        return self.data * self.each


def desired_size(observed: Observed, spec: InferenceServiceSpec) -> Desired | None:
    """None: the service is not elastic."""
    split = spec.parallelism
    if split.elastic is None:
        return None
    unit, given, each = ("expert", split.expert, split.tensor) if split.expert is not None else ("data", split.data or 1, 1)
    taken = f"{unit}={given}"
    asked = _asked(scale_object(observed), taken, given)
    data, rounded = _legal(asked, spec, unit, each)
    return Desired(data, asked, unit, each, rounded, taken)


def scale_object(observed: Observed) -> Manifest | None:
    """The live ParallelismScale of the service."""
    live = observed.children.get((SCALE_KIND, observed.service.name))
    return None if live is None or live["metadata"].get("deletionTimestamp") else live


def _asked(live: Manifest | None, taken: str, given: int) -> int:
    if live is None or (live["metadata"].get("annotations") or {}).get(TAKEN) != taken:
        return given
    return int(live["spec"].get("replicas", given))


def _legal(asked: int, spec: InferenceServiceSpec, unit: str, each: int) -> tuple[int, str]:
    """The next size that a group can have: never less than was asked for, but for the largest."""
    sizes = elastic_sizes(spec.parallelism, spec.accelerators.per_node)
    data = next((size for size in sizes if size * each >= asked), sizes[-1])
    if data * each == asked:
        return data, ""
    possible = ", ".join(str(size * each) for size in sizes[:16]) + (", ..." if len(sizes) > 16 else "")
    return data, f"spec.replicas: no group can have {asked}, so it is {data * each}; possible for {unit} are {possible}"
