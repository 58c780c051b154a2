"""Steps of all groups of a service. Groups change size one after the other, the lowest number first.

So a size that cannot be had is tried on one group only, while the others serve. And two groups that grow never wait for each
other's nodes.
"""

from collections.abc import Callable, Iterable, Mapping

from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.elastic.elastic_state import ElasticState
from starling_operator.plan.elastic.next_step import ElasticDecision, ElasticInput, next_step
from starling_operator.plan.elastic.parallelism_scale import Desired
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Observed


def elastic_steps(
    observed: Observed,
    spec: InferenceServiceSpec,
    desired: Desired | None,
    kept: Iterable[Group],
    serves: Callable[[Group], bool],
    at_wanted_size: Callable[[Group], bool],
) -> Mapping[str, ElasticDecision]:
    """Returns steps by name, of elastic groups that stay. Groups of an old revision keep their size until they are replaced."""
    groups = [group for group in kept if group.elastic is not None]
    data = desired.data if desired is not None else None
    has_turn = _whose_turn(groups, data)
    steps = {}
    for group in groups:
        turn = ElasticInput(
            desired=data if group.target else None,
            resizes=group.name == has_turn,
            serves=serves(group),
            at_wanted_size=at_wanted_size(group),
            drain=spec.drain,
            recovery=spec.recovery,
            now=observed.now,
            answers=observed.answers,
        )
        steps[group.name] = next_step(group, turn)
    return steps


def _whose_turn(groups: list[Group], desired: int | None) -> str:
    """Returns the group that changes size now, else the first whose size differs from the wanted one."""
    sizes = [(group, group.elastic) for group in groups if group.elastic is not None]
    busy = (group.name for group, state in sizes if _is_resizing(state))
    others = (group.name for group, state in sizes if group.target and state.effective not in (0, desired))
    return next(busy, "") or next(others, "")


def _is_resizing(state: ElasticState) -> bool:
    return state.is_changing and state.stored is not None and state.stored.source.data > 0
