"""The steps of all groups of a service. Groups change size one after the other, the lowest number first.

So a size that cannot be had is tried on one group only, while the others serve; and two groups that grow at once could each wait
for the pods that the other one holds.
"""

from collections.abc import Callable, Iterable, Mapping

from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.elastic.desired import Desired
from starling_operator.plan.elastic.elastic_state import ElasticState
from starling_operator.plan.elastic.next_step import next_step
from starling_operator.plan.elastic.step import ElasticStep, ElasticTurn
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Observed


def steps_of(
    observed: Observed,
    spec: InferenceServiceSpec,
    desired: Desired | None,
    kept: Iterable[Group],
    serves: Callable[[Group], bool],
    whole: Callable[[Group], bool],
) -> Mapping[str, ElasticStep]:
    """By name, of the elastic groups among those that stay. Groups of an older revision keep their size until they are replaced."""
    groups = [group for group in kept if group.sizing is not None]
    data = desired.data if desired is not None else None
    has_turn = _whose_turn(groups, data)
    steps = {}
    for group in groups:
        turn = ElasticTurn(
            desired=data if group.target else None,
            resizes=group.name == has_turn,
            serves=serves(group),
            whole=whole(group),
            drain=spec.drain,
            recovery=spec.recovery,
            now=observed.now,
            answers=observed.answers,
        )
        steps[group.name] = next_step(group, turn)
    return steps


def _whose_turn(groups: list[Group], desired: int | None) -> str:
    """The group that changes size now; else the first that has another one than is wanted."""
    sizes = [(group, group.sizing) for group in groups if group.sizing is not None]
    busy = (group.name for group, sizing in sizes if _is_resizing(sizing))
    others = (group.name for group, sizing in sizes if group.target and sizing.effective not in (0, desired))
    return next(busy, "") or next(others, "")


def _is_resizing(sizing: ElasticState) -> bool:
    return sizing.is_changing and sizing.stored is not None and sizing.stored.source.data > 0
