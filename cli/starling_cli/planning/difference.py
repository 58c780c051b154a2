"""Effects that an edit of a manifest would have on a running service. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starling_crds.spec_layout import group_layout
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_operator.plan.observed import Service
from starling_operator.plan.revision import spec_hash

ABSENT = "not set"


@dataclass(frozen=True)
class FieldChange:
    """A changed field. Values are those after defaults."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Difference:
    """Difference of one service. `effects` says in sentences what happens to the pods; empty when nothing changes at all."""

    service: str
    changes: tuple[FieldChange, ...]
    effects: tuple[str, ...]


def difference(before: Service | None, after: Service | None) -> Difference:
    """Compares a service in the old file and the new one; None where a file lacks it."""
    if after is None:
        assert before is not None
        return Difference(before.name, (), ("not in the new file: `kubectl apply` leaves it as it is; `kubectl delete` ends it",))
    assert after.spec is not None
    if before is None:
        return Difference(after.name, (), (f"new: {_count(_groups(after.spec))}",))
    assert before.spec is not None
    changes = tuple(_changes("spec", _dumped(before.spec), _dumped(after.spec)))
    return Difference(after.name, changes, tuple(_effects(before.spec, after.spec)) if changes else ())


def _effects(before: InferenceServiceSpec, after: InferenceServiceSpec) -> Iterator[str]:
    old, new = _groups(before), _groups(after)
    if spec_hash(before) != spec_hash(after):
        if old and new:
            rollout = after.rollout
            # Both at zero would never move; the rollout then takes one group away.
            missing = rollout.max_unavailable or (0 if rollout.max_surge else 1)
            yield (
                f"rolling update: {_count(old)} of a new revision, one after the other, in place of those that serve,"
                f" with at most {rollout.max_surge} more and {missing} fewer than {new} at any time"
            )
        else:
            yield "a new revision, without groups to replace"
    if old != new:
        yield f"scale: from {old} to {_count(new)}"
    if spec_hash(before) == spec_hash(after):
        resized = _resized(before, after)
        if resized and old and new:
            yield resized
        elif old == new:
            yield "in place: no pod restarts"


def _resized(before: InferenceServiceSpec, after: InferenceServiceSpec) -> str:
    """Returns the change of size within one revision, which can only be within elastic bounds; "" if there is none."""
    old, new = (group_layout(spec.parallelism, spec.accelerators.per_node) for spec in (before, after))
    if old.data == new.data:
        return ""
    sizes = f"EP {old.expert} -> {new.expert}" if after.parallelism.expert is not None else f"DP {old.data} -> {new.data}"
    pods = f"{old.nodes} -> {new.nodes} pods each"
    return f"scale operation: the groups go {sizes} ({pods}) while they serve, one after the other; no pod that stays restarts"


def _count(groups: int) -> str:
    return "1 group" if groups == 1 else f"{groups} groups"


def _groups(spec: InferenceServiceSpec) -> int:
    return 0 if spec.suspend else spec.replicas


def _dumped(spec: InferenceServiceSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True)


def _changes(path: str, before: Any, after: Any) -> Iterator[FieldChange]:
    """Yields the changes leaf by leaf; lists are compared as a whole."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from _changes(f"{path}.{key}", before.get(key, ABSENT), after.get(key, ABSENT))
    elif before != after:
        yield FieldChange(path, before, after)
