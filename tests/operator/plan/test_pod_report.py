"""A report counts only for the pod that it names."""

from dataclasses import replace
from typing import Any

import pytest
from starling_agent.contract.report import Phase
from starling_operator.plan.pod_report import TOKEN_REFUSED, report_mismatch, with_report
from starling_operator.plan.readiness import unready_reason
from starling_operator.plan.recovery import unlabelled_pod_deletions

from tests.operator.plan.building import make_group, make_pod, make_report
from tests.operator.plan.test_readiness import EXPECTED


def test_a_pods_own_report_is_believed() -> None:
    assert report_mismatch(make_pod(), "chat", make_report()) == ""


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"revision": "bbbbbbb"}, "revision"),
        ({"group": "chat-aaaaaaa-1"}, "group"),
        ({"service": "other"}, "service"),
        ({"node": 1}, "node"),
        ({"pod": "chat-aaaaaaa-0-1"}, "pod"),
    ],
)
def test_a_report_of_another_makes_nothing_ready_though_it_was(fields: dict[str, Any], word: str) -> None:
    seen = with_report(make_pod(), "chat", make_report(**fields), age=1.0)
    assert seen.report is None
    reason = unready_reason(make_group(pods=[seen], was_ready=True), EXPECTED)
    assert reason.startswith(f"chat-aaaaaaa-0-0: its agent's report is rejected: its report is of another {word} ")


@pytest.mark.parametrize(
    ("phase", "pod", "drains"),
    [
        ("serving", {}, False),
        ("draining", {}, True),
        # the operator restarts a broken group
        ("draining", {"deleted_at": 1.0}, False),
        ("draining", {"phase": "Failed"}, False),
    ],
)
def test_an_agent_that_drains_though_nobody_deletes_its_pod_is_shut_down_with_its_node(
    phase: Phase, pod: dict[str, Any], drains: bool
) -> None:
    seen = with_report(make_pod(**pod), "chat", make_report(phase=phase), age=1.0)
    assert seen.drains is drains
    assert not with_report(make_pod(**pod), "other", make_report(phase=phase), age=1.0).drains, "its report is rejected"


def test_an_agent_that_refuses_the_token_is_reported_and_left_to_serve() -> None:
    seen = with_report(make_pod(report=None), "chat", None, age=1.0, error=TOKEN_REFUSED)
    assert unready_reason(make_group(pods=[seen], was_ready=True), EXPECTED) == ""
    assert unready_reason(make_group(pods=[seen]), EXPECTED) == "chat-aaaaaaa-0-0: its agent refuses the operator's token"


def test_an_answer_that_was_no_report_is_shown_in_its_words() -> None:
    seen = with_report(make_pod(), "chat", None, age=1.0, error="its answer is longer than 9 bytes")
    assert "longer than 9 bytes" in unready_reason(make_group(pods=[seen], was_ready=True), EXPECTED)
    assert unready_reason(make_group(pods=[replace(seen, report_error="")], was_ready=True), EXPECTED) == ""


def test_a_pod_that_lost_its_labels_is_not_ready_and_is_replaced() -> None:
    pod = make_pod(unlabelled=True)
    assert "lost its labels" in unready_reason(make_group(pods=[pod]), EXPECTED)
    assert [(gone.name, gone.grace_seconds) for gone in unlabelled_pod_deletions([pod, make_pod(number=1)])] == [
        ("chat-aaaaaaa-0-0", None)
    ]
    assert unlabelled_pod_deletions([replace(pod, deleted_at=1.0)]) == ()
