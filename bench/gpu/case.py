"""What the kernels' section measures: one kernel at one size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from bench.gpu.clock import Call, Clock
from bench.gpu.roofline import Cost, Limits
from bench.gpu.table import Row, quantity

Maker = Callable[[torch.device], Call]
"""Draws inputs on the device, and gives the call that uses them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`cost` is the least that it can take. With `rivals`, by name, `goal` is the share of the fastest one's speed instead."""

    what: str
    make: Maker
    cost: Cost
    goal: float | None = None
    rivals: dict[str, Maker] = field(default_factory=dict)


def measure(case: Case, clock: Clock, limits: Limits) -> Iterator[Row]:
    took, least = _time(case.make, case, clock), limits.seconds(case.cost)
    own_goal = None if case.rivals else case.goal
    yield Row(case.what, quantity(took, "s"), quantity(least, "s"), least / took, own_goal)
    if case.rivals:
        others = dict(_rivals(case, clock))
        name = min(others, key=others.__getitem__)
        yield Row(f"the same beside {name}", quantity(took, "s"), quantity(others[name], "s"), others[name] / took, case.goal)


def _rivals(case: Case, clock: Clock) -> Iterator[tuple[str, float]]:
    """Those that run here. Raises what they did when none does."""
    failures: list[Exception] = []
    for name, make in case.rivals.items():
        try:
            yield name, _time(make, case, clock)
        except RuntimeError as error:
            failures.append(error)
    if len(failures) == len(case.rivals):
        raise ExceptionGroup(f"{case.what}: nothing to compare with runs here", failures)


def _time(make: Maker, case: Case, clock: Clock) -> float:
    torch.manual_seed(0)
    return clock([make(clock.device) for _ in range(clock.sets(int(case.cost.bytes)))])
