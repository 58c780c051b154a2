"""What stands refused, as long as it is wanted."""

import pytest
from starling_operator.apply.refusals import WriteRefusals
from starling_operator.plan.observed import Manifest

KEY = ("n", "chat")


def named(name: str) -> Manifest:
    return {"kind": "StatefulSet", "metadata": {"name": name}}


@pytest.mark.parametrize(("tries", "passing", "is_told"), [(1, False, True), (1, True, False), (2, True, False), (3, True, True)])
def test_a_passing_error_is_told_only_when_it_stays(tries: int, passing: bool, is_told: bool) -> None:
    refusals = WriteRefusals()
    for _ in range(tries):
        refusals.add(KEY, named("a"), "no", passing)
    assert refusals.told(KEY) == ({"a"} if is_told else set())


def test_what_is_written_or_not_wanted_any_more_is_not_refused() -> None:
    refusals = WriteRefusals()
    for name in "abc":
        refusals.add(KEY, named(name), "no")
    refusals.keep(KEY, [named("a"), named("b"), named("d")])
    assert refusals.told(KEY) == {"a", "b"}
    refusals.clear(KEY, named("a"))
    assert refusals.told(KEY) == {"b"}
    refusals.forget(KEY)
    refusals.keep(KEY, [])
    assert refusals.told(KEY) == frozenset()
