"""Displays of `starling up`, for people and machines."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from starling_agent.contract.report import Progress, Report
from starling_cli.local.display import JsonDisplay, LineDisplay, TableDisplay
from starling_cli.local.pod import LocalPod
from starling_cli.local.status import describe_progress, local_status
from starling_crds.v1alpha1.status import Condition, InferenceServiceStatus
from starling_operator.plan.decision import Event


def pod(report=None, **changes):
    made = LocalPod(
        name="chat-a-0-0", group="chat-a-0", group_uid="u", revision="a", number=0, folder=Path(), scratch=Path(), log=Path()
    )
    for name, value in changes.items():
        setattr(made, name, value)
    made.report = report
    return made


def report(phase="serving", **more):
    return Report(
        version=1, incarnation="i", agent="1", config_hash="h", service="chat", revision="a", group="g", node=0, pod="p",
        phase=phase, **more,
    )  # fmt: skip


def status(pods=(), ready="False", trouble="", stopping=False, **conditions):
    found = [Condition(type="Ready", status=ready, reason="Progressing", message="0 of 1 groups serve")]
    found += [Condition(type=name, status="True", reason=f"{name}Reason", message="why") for name in conditions]
    status = InferenceServiceStatus(conditions=found)
    return local_status(
        service="chat",
        model="hf://a/b",
        url="http://here/v1",
        status=status,
        wanted=1,
        pods=pods,
        routers=(),
        trouble=trouble,
        stopping=stopping,
    )


@pytest.mark.parametrize(
    ("found", "phase"),
    [
        (pod(), "waiting"),
        (pod(pid=1), "starting"),
        (pod(report("loading"), pid=1), "loading"),
        (pod(report(), pid=1, deleted_at=1.0), "draining"),
        (pod(deleted_at=1.0), "ending"),
    ],
)
def test_phases(found, phase):
    assert status([found]).rows[0].phase == phase


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(done=3_200_000_000, total=7_600_000_000, eta_seconds=39.6), "3.2/7.6 GB, about 40 s left"),
        (Progress(done=1_000_000, total=9_500_000), "1.0/9.5 MB"),
        (Progress(done=1, total=2000), "0.0/2.0 kB"),
        (Progress(done=3, total=80, unit="tensors"), "3/80 tensors"),
    ],
)
def test_progress(progress, text):
    assert describe_progress(progress) == text


def test_headlines():
    assert status().headline == "not ready: Progressing 0 of 1 groups serve"
    assert status(ready="True").headline == "ready at http://here/v1"
    assert status(Stalled=1).headline == "not ready: StalledReason why"
    assert status(Available=1).headline.startswith("serving, not ready")
    assert status(ready="True", stopping=True).headline == "draining"


def test_each_change_is_one_line():
    out = io.StringIO()
    display = LineDisplay(out)
    loading = pod(report("loading", progress=Progress(done=1, total=2)), pid=1)
    display.status(status([loading]))
    loading.report = report("loading", progress=Progress(done=2, total=2))
    display.status(status([loading]))
    display.event(Event("Normal", "Created", "group chat-a-0"))
    display.status(status([pod(report(ready=True), pid=1)], ready="True"))
    assert out.getvalue().splitlines() == [
        "chat: not ready: Progressing 0 of 1 groups serve",
        "chat-a-0-0: loading",
        "normal Created: group chat-a-0",
        "chat: ready at http://here/v1",
        "chat-a-0-0: serving, ready",
    ]


def test_a_silent_start_gives_a_sign_of_life(monkeypatch):
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr("starling_cli.local.display.time.monotonic", lambda: now[0])
    display = LineDisplay(out)
    display.status(status([pod(report("loading", progress=Progress(done=1, total=4, unit="tensors")), pid=1)]))
    display.refresh()
    assert "still" not in out.getvalue()
    now[0] += 4.5
    display.refresh()
    assert out.getvalue().splitlines()[-1] == "still waiting: chat-a-0-0 loading 1/4 tensors"
    display.status(status(ready="True"))
    now[0] += 60
    display.refresh()
    assert "still" not in out.getvalue().splitlines()[-1]


def test_json_lines_for_changes_only():
    out = io.StringIO()
    display = JsonDisplay(out)
    for _ in range(3):
        display.status(status([pod()]))
    display.note("a note")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["kind"] for line in lines] == ["status", "note"]
    assert lines[0]["rows"][0]["pod"] == "chat-a-0-0"


def test_the_table_on_a_terminal():
    out = io.StringIO()
    display = TableDisplay(Console(file=out, force_terminal=True, width=120, highlight=False))
    display.note("[not markup]")
    display.event(Event("Warning", "Restarted", "the agent died"))
    display.status(status([pod(report("loading"), pid=1)], trouble="service.yaml: spec.replicas: bad"))
    display.close()
    for words in ("[not markup]", "Restarted: the agent died", "chat-a-0-0", "loading", "spec.replicas: bad", "ctrl-C drains"):
        assert words in out.getvalue()
