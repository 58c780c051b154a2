"""A revision's weights are one commit, chosen once, and what is loaded is compared."""

from dataclasses import replace

import pytest
from starling_operator.plan.pinned_commit import common_weights, new_pinned_commit, pinned_commit
from starling_operator.plan.plan import plan
from starling_operator.plan.readiness import unready_reason
from starling_operator.plan.revision import read_revisions

from tests.operator.plan.building import make_group, make_observed, make_pod, make_report, make_spec
from tests.operator.plan.test_readiness import EXPECTED

A, B = "a" * 40, "b" * 40


def revision_of(source: str = "hf://org/name"):
    observed = make_observed(make_spec({"model": {"source": source}}))
    return observed, read_revisions(observed, observed.service.spec).target


@pytest.mark.parametrize(
    ("source", "awaits"),
    [
        ("hf://org/name", True),
        ("hf://org/name@v1", True),
        (f"hf://org/name@{A}", False),
        (f"hf://org/name:m.gguf@{A}", False),
        ("pvc://weights/chat", False),
    ],
)
def test_only_a_name_that_can_move_is_pinned(source: str, awaits: bool) -> None:
    _, revision = revision_of(source)
    assert revision.awaits_pinned_commit == awaits
    mounted = [volume for volume in revision.template["spec"]["volumes"] if volume["name"] == "pin"]
    assert [volume["configMap"]["optional"] for volume in mounted] == [True] * awaits


@pytest.mark.parametrize(
    ("reports", "chosen"),
    [
        ([], None),
        ([None], None),
        ([{"commit": None}], None),
        ([{"commit": "main"}], None),
        ([{"commit": B, "revision": "another"}], None),
        ([{"commit": B}, {"commit": A}], B),
        ([{"commit": B}, {"commit": A, "weights": "loaded"}], A),
    ],
)
def test_the_first_answer_is_chosen_but_what_is_loaded_already_comes_first(reports, chosen) -> None:
    observed, revision = revision_of()
    group = f"chat-{revision.id}-0"
    pods = tuple(
        make_pod(group, number, report=None if report is None else make_report(**{"revision": revision.id} | report))
        for number, report in enumerate(reports)
    )
    made = new_pinned_commit(replace(observed, pods=pods), revision)
    assert [one["data"]["commit"] for one in made] == ([chosen] if chosen else [])
    if made:
        children = {("ConfigMap", made[0]["metadata"]["name"]): made[0]}
        assert pinned_commit("chat", revision.id, children) == chosen and made[0]["immutable"]
        assert new_pinned_commit(replace(observed, pods=pods, children=children), revision) == (), "once"


def test_a_pod_with_another_commit_or_other_weights_is_not_ready_and_named() -> None:
    expected = replace(EXPECTED, commit=A, weights="1" * 64)
    for fields, reason in (
        ({}, ""),
        ({"commit": A, "weights": "1" * 64}, ""),
        ({"commit": B}, "chat-aaaaaaa-0-0: serves commit bbbbbbbbbbbb of the model, but its revision is pinned to aaaaaaaaaaaa"),
        ({"weights": "2" * 64}, "chat-aaaaaaa-0-0: serves other weights (222222222222)"),
    ):
        assert unready_reason(make_group(pods=[make_pod(report=make_report(**fields))]), expected).startswith(reason)
        assert bool(unready_reason(make_group(pods=[make_pod(report=make_report(**fields))]), expected)) == bool(reason)


def test_most_pods_say_what_the_weights_are() -> None:
    groups = [make_group(f"chat-aaaaaaa-{n}", [make_pod(report=make_report(weights=w))]) for n, w in enumerate("xyy")]
    assert common_weights(groups) == "y" and common_weights(groups[:2]) == "x" and common_weights([]) is None


def test_the_plan_writes_the_pin_down() -> None:
    observed, revision = revision_of()
    pod = make_pod(f"chat-{revision.id}-0", report=make_report(revision=revision.id, commit=A))
    created = plan(replace(observed, pods=(pod,))).create
    assert f"chat-{revision.id}-pin" in [made["metadata"]["name"] for made in created]
