"""A service as `starling status` reads it, also with fields missing."""

from datetime import UTC, datetime, timedelta

import pytest
from starling_cli.cluster.service_view import age_of, view_of

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def service(status=None, **spec):
    meta = {"name": "chat", "namespace": "team", "generation": 2, "creationTimestamp": "2026-05-01T11:00:00Z"}
    return {"metadata": meta, "spec": {"model": {"source": "hf://a/b"}, **spec}, "status": status or {}}


def test_nobody_has_seen_it():
    view = view_of(service(), NOW)
    assert (view.ready, view.up_to_date) == ("Unknown", False)
    assert (view.serving, view.wanted, view.age) == (0, 1, "60m")


def test_it_serves():
    status = {
        "observedGeneration": 2,
        "readyReplicas": 2,
        "topology": "TP1 PP1 DP1",
        "url": "http://chat",
        "revision": {"current": "a", "target": "b"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "all is well"}],
        "groups": [{"name": "chat-a-0", "ready": True, "nodes": [{"pod": "chat-a-0-0", "phase": "loading", "progress": "1/2 GB"}]}],
        "aFieldOfALaterRelease": 1,
    }
    view = view_of(service(status, replicas=2), NOW)
    assert (view.ready, view.serving, view.wanted, view.up_to_date, view.revision) == ("True", 2, 2, True, "a -> b")
    assert view.groups[0].nodes == (("chat-a-0-0", "", "loading 1/2 GB"),)


def test_a_suspended_service_wants_none():
    assert view_of(service(replicas=3, suspend=True), NOW).wanted == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172799, "47h"), (172800, "2d")],
)
def test_ages(seconds, text):
    assert age_of((NOW - timedelta(seconds=seconds)).isoformat(), NOW) == text


def test_no_age():
    assert age_of(None, NOW) == ""
