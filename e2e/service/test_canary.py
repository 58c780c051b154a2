"""Two canaries under traffic: one answers as before and is promoted, one answers other tokens and is rolled back by itself."""

import json
import math

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, condition, wait_until
from e2e.service.watched import MODEL, Traffic, Watched, failures
from e2e.under_test import ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
OTHER_MODEL = "file:///opt/starling/models/starling-random-moe"
WEIGHT = 20
CANARY = {"steps": [{"weight": WEIGHT, "seconds": 5}], "stickyBy": "none", "compare": "tokens"}
SERVED = """
import httpx, sys
from urllib.parse import urljoin
lines = httpx.get(urljoin(sys.argv[1], "/metrics"), timeout=10).text.splitlines()
name = 'starling:router_revision_requests_total{revision="%s"} ' % sys.argv[2]
print(sum(float(line.removeprefix(name)) for line in lines if line.startswith(name)))
"""


def test_a_canary_is_promoted_or_rolled_back_and_no_request_fails(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = service(model={"source": MODEL, "dtype": "float32"}, router={"replicas": 1}, rollout={"canary": CANARY, "pause": True})
    chat.wait_ready()
    first = chat.now["status"]["revision"]["current"]
    traffic = Traffic(kubectl, chat, cluster.agent_image, streams=4, tokens=8)
    traffic.wait_for_more(4)

    chat.patch(template={"metadata": {"annotations": {"example.com/team": "search"}}})
    good = tried(chat, "trying")
    wait_until("requests go to the canary", lambda: float(traffic.runs(SERVED, chat.url, good)) > 0, 180, chat.explain)
    wait_until("a router that starts finds it there", lambda: stored_canary(kubectl, chat) == (good, WEIGHT), 30, chat.explain)
    chat.patch(rollout={"pause": False})
    wait_until("the canary has passed", lambda: is_promoted(chat, good), 180, chat.explain)
    wait_until("it serves alone", lambda: revisions(chat) == {good} and chat.is_true("Ready"), 180, chat.explain)
    right = traffic.requests()
    assert failures(right) == []
    texts = {request["prompt"]: request["text"] for request in right}
    assert all(texts[request["prompt"]] == request["text"] for request in right), "a canary that changes nothing changes no answer"

    chat.patch(model={"source": OTHER_MODEL, "dtype": "float32"})
    bad = tried(chat, "rolledBack")
    assert bad not in (first, good) and chat.is_true("Stalled")
    assert "other tokens" in condition(chat.now, "Stalled")["message"]
    wait_until("the canary's pods are gone", lambda: revisions(chat) == {good}, 180, chat.explain)
    traffic.wait_for_more(4)

    requests = traffic.stop()
    assert failures(requests) == []
    since = requests[len(right) :]
    touched = [request for request in since if request["text"] != texts.get(request["prompt"], request["text"])]
    print(f"{len(requests)} requests, {len(since)} since the second canary began, of which {len(touched)} had answers of it")
    assert len(touched) <= WEIGHT * math.ceil(len(since) / 100), "of each hundred requests it gets its weight at most"
    assert touched == [] or requests[-1] not in touched


def tried(chat: Watched, phase: str) -> str:
    """The canary's revision, once it is in that phase."""
    found: list[str] = []

    def is_in_phase() -> bool:
        canary = chat.now["status"].get("canary") or {}
        if canary.get("phase") == phase:
            found.append(canary["revision"])
        return bool(found)

    took = wait_until(f"a canary is {phase}", is_in_phase, 180, chat.explain)
    print(f"{found[0]} is {phase} after {took:.1f} s")
    return found[0]


def stored_canary(kubectl: Kubectl, chat: Watched) -> tuple[str, int]:
    """The revision and its weight as routers find them at their start. Those that run are told a moment before."""
    stored = json.loads(kubectl.get("configmap", f"{chat.name}-router")["data"]["canary.json"])
    return stored["canary"], stored["weight"]


def is_promoted(chat: Watched, revision: str) -> bool:
    """True once a canary has passed. The phase is there only until its groups are the service's."""
    status = chat.now["status"]
    canary = status.get("canary") or {}
    return (canary.get("phase"), canary.get("revision")) == ("passed", revision) or status["revision"]["current"] == revision


def revisions(chat: Watched) -> set[str]:
    """Counts all pods that there are, those that drain included."""
    return {pod["metadata"]["labels"]["serving.starling.dev/revision"] for pod in chat.pods()}
