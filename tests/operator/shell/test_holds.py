"""Whether a live object already is what would be applied."""

from typing import Any

import pytest
from starling_operator.holds import Settled, holds


@pytest.mark.parametrize(
    ("live", "wanted", "answer"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 1}}}, True),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, False),
        ({"a": [1, 2]}, {"a": [1, 2]}, True),
        ({"a": [2, 1]}, {"a": [1, 2]}, False),
        ({"a": [1, 2, 3]}, {"a": [1, 2]}, False),
        ({"a": [{"name": "x", "default": 1}]}, {"a": [{"name": "x"}]}, True),
        ({"a": "x"}, {"a": {"b": 1}}, False),
        ({"a": None}, {"a": {"b": 1}}, False),
        ({}, {"a": None}, True),
        ({"a": {}}, {"a": {}}, True),
        ({"a": True}, {"a": True}, True),
        ({"a": "1"}, {"a": 1}, False),
    ],
)
def test_holds(live: dict[str, Any], wanted: dict[str, Any], answer: bool) -> None:
    assert holds(live, wanted) is answer


def _live(cpu: str, version: str = "1", label: str = "a") -> dict[str, Any]:
    metadata = {"uid": "u", "resourceVersion": version, "labels": {"l": label}}
    return {"metadata": metadata, "spec": {"cpu": cpu}, "status": {"seen": version}}


def test_what_the_api_server_writes_in_its_own_way_is_settled_until_somebody_changes_it() -> None:
    settled, wanted = Settled(), {"spec": {"cpu": "1000m"}}
    settled.remember(_live("1"), wanted)
    assert settled.knows(_live("1", version="2"), wanted)
    assert not settled.knows(_live("2", version="2"), wanted)
    assert not settled.knows(_live("1", version="2", label="b"), wanted)
    assert not settled.knows(_live("1"), {"spec": {"cpu": "2000m"}})
