"""Refusals are remembered as long as the object is wanted."""

import pytest
from starling_operator.apply.refusals import WriteRefusals
from starling_operator.plan.observed import Manifest

KEY = ("n", "chat")


def named(name: str) -> Manifest:
    return {"kind": "StatefulSet", "metadata": {"name": name}}


@pytest.mark.parametrize(
    ("tries", "transient", "is_reported"), [(1, False, True), (1, True, False), (2, True, False), (3, True, True)]
)
def test_a_transient_error_is_reported_only_when_it_stays(tries: int, transient: bool, is_reported: bool) -> None:
    refusals = WriteRefusals()
    for _ in range(tries):
        refusals.add(KEY, named("a"), "no", transient)
    assert refusals.reported(KEY) == ({"a"} if is_reported else set())


def test_a_written_or_unwanted_object_is_not_refused() -> None:
    refusals = WriteRefusals()
    for name in "abc":
        refusals.add(KEY, named(name), "no")
    refusals.retain(KEY, [named("a"), named("b"), named("d")])
    assert refusals.reported(KEY) == {"a", "b"}
    refusals.clear(KEY, named("a"))
    assert refusals.reported(KEY) == {"b"}
    refusals.forget(KEY)
    refusals.retain(KEY, [])
    assert refusals.reported(KEY) == frozenset()
