"""A group is ready only if its agents report it."""

from dataclasses import replace
from typing import Any

import pytest
from starling_agent.contract.report import Progress, Topology
from starling_crds.layout import GroupLayout
from starling_crds.v1alpha1.status import OperationStatus
from starling_operator.plan.group import Group
from starling_operator.plan.progress import progress_text
from starling_operator.plan.readiness import ExpectedReports, has_model_loaded, phase_text, unready_reason

from tests.operator.plan.building import HASH, NOW, make_group, make_pod, make_report, pending, record
from tests.operator.plan.elastic.building import group_of, stored

ONE = GroupLayout(tensor=1, pipeline=1, data=1)
EXPECTED = ExpectedReports(HASH, ONE)
FOUR = GroupLayout(tensor=2, pipeline=1, data=2, per_node=2)
SERVES_FOUR = Topology(tensor=2, pipeline=1, data=2, expert=4, ranks=4)


def of(**fields: Any) -> Group:
    return make_group(pods=[make_pod(**fields)])


def test_a_group_whose_agent_reports_all_that_was_asked_is_ready() -> None:
    assert unready_reason(make_group(), EXPECTED) == ""


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"phase": "loading", "ready": False}, "loading"),
        ({"phase": "warming"}, "warming"),
        ({"phase": "draining"}, "draining"),
        ({"ready": False}, "serving"),
        ({"healthy": False, "last_error": "hung"}, "last error: hung"),
        ({"phase": "failed", "last_error": "no such model"}, "container agent failed: no such model"),
        (
            {"phase": "failed", "last_error": "tensor_parallel_size: 3 ranks cannot share this model"},
            "container agent failed: spec.parallelism.tensor (tensor_parallel_size): 3 ranks cannot share this model",
        ),
        ({"phase": "failed"}, "its agent gives no cause"),
        ({"config_hash": "other"}, "another configuration"),
        ({"token_seen": False}, "no token came through its endpoint"),
        ({"service_token_seen": False}, "no token came through the Service yet"),
        ({"service_token_seen": False, "last_error": "refused"}, "through the Service yet: refused"),
        ({"topology": None}, "reports no topology"),
        (
            {"topology": Topology(tensor=2, pipeline=1, data=1, ranks=2)},
            "serves TP2 PP1 DP1 EP1, but the spec asks for TP1 PP1 DP1",
        ),
        ({"topology": Topology(tensor=1, pipeline=2, data=1, ranks=2)}, "serves TP1 PP2"),
        ({"topology": Topology(tensor=1, pipeline=1, data=2, ranks=2)}, "DP2"),
        ({"topology": Topology(tensor=1, pipeline=1, data=1, ranks=2)}, "but the spec asks for"),
    ],
)
def test_what_an_agent_reports_instead_is_shown(fields: dict[str, Any], why: str) -> None:
    reason = unready_reason(of(report=make_report(**fields)), EXPECTED)
    assert reason.startswith("chat-aaaaaaa-0-0: ")
    assert why in reason


@pytest.mark.parametrize(
    ("seen", "through_service", "ready"),
    [(None, False, True), (True, False, True), (False, False, False), (None, True, False), (True, True, True)],
)
def test_a_token_has_to_come_through_the_service_where_there_is_one(seen: bool | None, through_service: bool, ready: bool) -> None:
    reason = unready_reason(of(report=make_report(service_token_seen=seen)), replace(EXPECTED, through_service=through_service))
    assert (reason == "") == ready


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (pending(), "is not scheduled yet"),
        (pending(waiting="Unschedulable: 0/2 nodes are available"), "Unschedulable: 0/2 nodes are available"),
        (pending(scheduled=True), "its container starts"),
        (
            pending(scheduled=True, waiting="ImagePullBackOff: not found"),
            "container agent: ImagePullBackOff: not found",
        ),
        ({"ready": False, "report": None}, "its agent has not answered yet"),
        (
            {"ready": False, "report": None, "waiting": "CrashLoopBackOff: back-off 20s", "termination_message": "no module torch"},
            "container agent: CrashLoopBackOff: back-off 20s; its last log: no module torch",
        ),
        (
            {"ready": False, "waiting": "CrashLoopBackOff: x", "report": make_report(last_error="rank 0 died")},
            "container agent: CrashLoopBackOff: x; its last log: rank 0 died",
        ),
        ({"ready": False, "phase": "Failed", "report": None, "termination_message": "killed"}, "ended as Failed: killed"),
        ({"lost": True, "cluster_node": "node-7"}, "its node node-7 is gone"),
        ({"deleted_at": NOW}, "is being deleted"),
        (
            {
                "ready": False,
                "report": make_report(
                    phase="downloading", progress=Progress(done=3_200_000_000, total=7_600_000_000, eta_seconds=40.2)
                ),
            },
            "downloading 3.2/7.6 GB, about 40 s left",
        ),
    ],
)
def test_a_pod_that_is_not_ready_says_what_it_waits_for(fields: dict[str, Any], why: str) -> None:
    assert unready_reason(of(**fields), EXPECTED) == f"chat-aaaaaaa-0-0: {why}"


def test_missing_pods_are_reported() -> None:
    assert unready_reason(make_group(pods=[], nodes=2), EXPECTED) == "chat-aaaaaaa-0: 2 of 2 pods are still to be created"
    one_of_two = make_group(pods=[make_pod()], nodes=2)
    assert unready_reason(one_of_two, EXPECTED) == "chat-aaaaaaa-0: 1 of 2 pods are still to be created"


def test_the_worst_pod_is_reported_first() -> None:
    starting = make_pod(number=0, ready=False, report=make_report(phase="loading"))
    pulling = make_pod(number=1, ready=False, report=None, waiting="ErrImagePull: no")
    failed = make_pod(number=2, ready=False, report=make_report(phase="failed", fatal=True, last_error="bad"))
    assert unready_reason(make_group(pods=[starting, pulling, failed]), EXPECTED).startswith("chat-aaaaaaa-0-2: ")
    assert unready_reason(make_group(pods=[starting, pulling]), EXPECTED).startswith("chat-aaaaaaa-0-1: ")


def pair(**second: Any) -> Group:
    given = {"topology": SERVES_FOUR}
    pods = [make_pod(number=0, report=make_report(**given)), make_pod(number=1, report=make_report(**(given | second)))]
    return make_group(pods=pods)


@pytest.mark.parametrize(
    ("second", "expert", "ready"),
    [
        ({}, None, True),
        ({}, 4, True),
        ({}, 8, False),
        ({"topology": None}, None, False),
        ({"topology": SERVES_FOUR.model_copy(update={"data": 1, "ranks": 2})}, None, False),
        ({"topology": SERVES_FOUR.model_copy(update={"expert": 1})}, None, True),
        ({"topology": SERVES_FOUR.model_copy(update={"expert": 1})}, 4, False),
        ({"token_seen": False}, None, False),
        ({"config_hash": "x"}, None, False),
    ],
)
def test_every_node_has_to_report_the_whole(second: dict[str, Any], expert: int | None, ready: bool) -> None:
    assert (unready_reason(pair(**second), ExpectedReports(HASH, FOUR, expert)) == "") == ready


@pytest.mark.parametrize(
    ("effective", "record", "topology", "why"),
    [
        (2, None, 2, ""),
        (2, None, 4, "serves TP1 PP1 DP4 EP4, but the spec asks for TP1 PP1 DP2 EP2"),
        (2, stored("done"), 4, "serves TP1 PP1 DP4 EP4"),
        # It changes, and one node has switched before the other.
        (2, stored("committing"), 4, ""),
        (4, stored("releasing"), 2, ""),
        (0, None, 2, "it has no size yet"),
    ],
)
def test_an_elastic_group_serves_at_its_present_size(
    effective: int, record: OperationStatus | None, topology: int, why: str
) -> None:
    """The wanted size, 8, does not matter here."""
    group = group_of(2, effective, None, record)
    seen = Topology(tensor=1, pipeline=1, data=topology, expert=topology, ranks=topology)
    pods = tuple(
        replace(pod, ready=True, report=pod.report and pod.report.model_copy(update={"topology": seen})) for pod in group.pods
    )
    wanted = ExpectedReports(HASH, GroupLayout(tensor=1, pipeline=1, data=8), expert=8)
    reason = unready_reason(replace(group, pods=pods), wanted)
    assert (reason == "") == (why == "")
    assert why in reason


def test_an_older_group_is_judged_by_its_own_probes() -> None:
    """Its agents may be a release older, with another layout."""
    other = make_report(config_hash="x", topology=None, token_seen=False)
    assert unready_reason(make_group(pods=[make_pod(report=other)], target=False), EXPECTED) == ""
    assert unready_reason(make_group(pods=[make_pod(ready=False, report=other)], target=False), EXPECTED) != ""


@pytest.mark.parametrize(("was_ready", "text"), [(True, ""), (False, "chat-aaaaaaa-0-0: its agent has not reported yet")])
def test_until_agents_have_answered_the_last_status_is_believed(was_ready: bool, text: str) -> None:
    """A start of the operator must not take Ready away for a moment."""
    group = replace(of(report=None, report_age=None), previous=record(make_group(), ready=True), was_ready=was_ready)
    assert unready_reason(group, EXPECTED) == text
    assert has_model_loaded(group) == was_ready


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (None, ""),
        (Progress(done=0, total=0), ""),
        (Progress(done=3_200_000_000, total=7_600_000_000), "3.2/7.6 GB"),
        (Progress(done=0, total=7_600_000_000), "0.0/7.6 GB"),
        (Progress(done=5_000_000, total=12_300_000), "5.0/12.3 MB"),
        (Progress(done=500, total=2_000), "0.5/2.0 kB"),
        (Progress(done=5, total=10), "5.0/10.0 bytes"),
        (Progress(done=12, total=300, unit="tensors"), "12/300 tensors"),
    ],
)
def test_progress_reads_in_people_s_units(progress: Progress | None, text: str) -> None:
    assert progress_text(progress) == text


@pytest.mark.parametrize(("eta", "text"), [(None, "loading 1/2 tensors"), (0.2, "loading 1/2 tensors, about 1 s left")])
def test_a_phase_shows_the_time_that_is_left(eta: float | None, text: str) -> None:
    assert phase_text(make_report(phase="loading", progress=Progress(done=1, total=2, unit="tensors", eta_seconds=eta))) == text


@pytest.mark.parametrize(
    ("phase", "is_loaded"),
    [("starting", False), ("downloading", False), ("loading", False), ("warming", True), ("serving", True), ("failed", False)],
)
def test_a_model_is_loaded_from_warming_on(phase: str, is_loaded: bool) -> None:
    assert has_model_loaded(of(report=make_report(phase=phase))) == is_loaded
