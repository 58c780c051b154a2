"""Times at which pods that are being deleted are killed."""

from dataclasses import replace
from typing import Any

import pytest
from starling_operator.plan.children import revision_children
from starling_operator.plan.drain_deadlines import drain_deadlines
from starling_operator.plan.observed import Pod

from tests.operator.plan.building import make_observed, make_spec
from tests.operator.plan.test_revision import target
from tests.operator.plan.world import PAIRS

ONE, OTHER = "chat-aaaaaaa-0", "chat-aaaaaaa-1"


def pod(group: str, number: int, end: float | None) -> Pod:
    return Pod(
        name=f"{group}-{number}",
        uid=f"{group[-1]}{number}",
        group=group,
        revision="aaaaaaa",
        number=number,
        grace_ends_at=end,
    )


@pytest.mark.parametrize(
    ("changes", "deadlines"),
    [
        (PAIRS, {"00": 30.0, "01": 30.0, "10": 90.0}),
        ({"parallelism": {"data": 2}}, {"00": 30.0, "01": 140.0, "10": 90.0}),
    ],
    ids=["pods that step together end with the first", "pods of their own have their own"],
)
def test_pods_that_are_deleted_get_the_time_of_their_kill(changes: dict[str, Any], deadlines: dict[str, float]) -> None:
    pods = (pod(ONE, 0, 30.0), pod(ONE, 1, 140.0), pod(ONE, 2, None), pod(OTHER, 0, 90.0))
    revision = replace(target(changes), id="aaaaaaa")
    observed = make_observed(make_spec(changes), pods=pods)
    children = {(made["kind"], made["metadata"]["name"]): made for made in revision_children(observed.service, revision)}
    assert drain_deadlines(replace(observed, children=children)) == deadlines
