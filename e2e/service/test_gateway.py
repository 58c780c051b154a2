"""A gateway before the agents: an Envoy in a pod asks a service's router where each request goes, and follows it."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, wait_until
from e2e.service.test_examples import install_gateway_crds
from e2e.service.test_keys import NAME, set_keys
from e2e.service.watched import HelperPod
from e2e.under_test import ClusterUnderTest
from tests.router.envoy import BINARY, config, original_destinations, picker_cluster

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BINARY.exists(), reason="`make envoy` installs it, where there is one for the machine"),
]
TENANTS = [{"name": "day"}, {"name": "few", "tokensPerMinute": 16}]
ROUTER = {"replicas": 1, "hold": {"seconds": 2}, "tenants": TENANTS, "tenantKeysSecret": NAME}
ROUTE = {"parentRefs": [{"name": "edge"}], "backend": "InferencePool"}
OF_GATEWAY = {"gateway.networking.k8s.io/gateway-name": "edge"}
"""Pods with it may ask the routers, as those that Istio makes for a Gateway."""
IMAGE = "localhost/starling-thin:1"
PORT, ADMIN_PORT = 8080, 9901
ASK = """
import httpx, json, sys
url, *asked = sys.argv[1:]
for key, model, session in map(json.loads, asked):
    headers = {"Authorization": f"Bearer {key}"} | ({"X-Session-Token": session} if session else {})
    body = {"model": model, "prompt": "A word", "max_tokens": 4}
    answer = httpx.post(url + "/v1/completions", timeout=60, json=body, headers=headers)
    error, shown = answer.json().get("error") or {}, answer.headers
    print(json.dumps([answer.status_code, error.get("code"), shown["content-type"], "retry-after" in shown]))
"""


@dataclass(frozen=True)
class Gateway:
    """Envoy's pod, and another one that asks it."""

    envoy: HelperPod
    client: HelperPod

    def ask(self, key: str, *sessions: str, model: str = "chat", host: str = "") -> list[tuple[int, Any]]:
        """Returns status and the error's code for a request of each session, by way of Envoy, or from its pod to another host."""
        url = f"http://{host or self.envoy.status['podIP']}:{8000 if host else PORT}"
        asker = self.envoy if host else self.client
        answers = asker.runs(ASK, url, *(json.dumps([key, model, session]) for session in sessions or ("",)))
        found = []
        for status, code, content_type, has_time in map(json.loads, answers.splitlines()):
            assert content_type == "application/json" and (has_time or status not in (429, 503))
            found.append((status, code))
        return found

    def served(self) -> list[str]:
        """Returns the endpoints of the answers with 200 so far, as Envoy has logged them."""
        lines = [line.split() for line in self.envoy.log().splitlines()]
        return [line[1] for line in lines if len(line) == 2 and line[0] == "200"]


def test_an_envoy_in_a_pod_follows_the_routers_picks(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    if cluster.folder is None:
        pytest.skip("only thin images have an Envoy")
    install_gateway_crds(kubectl)
    set_keys(kubectl, day="light", few="dim")
    chat = service(replicas=2, router=ROUTER, endpoint={"route": ROUTE})
    wait_until("there is a pool", lambda: bool(kubectl.get("inferencepool", "chat")), 60, chat.explain)
    client = HelperPod(kubectl, "client", IMAGE, ["sleep", "inf"], {})
    gateway = Gateway(apply_envoy(kubectl, kubectl.get("inferencepool", "chat")), client)
    chat.wait_ready()
    wait_until("the route leads to the pool", lambda: leads_to(kubectl) == "InferencePool", 60, chat.explain)
    gateway.envoy.wait_ready()
    gateway.client.wait_ready()
    (router,) = kubectl.find("pods", "serving.starling.dev/router=chat")
    agents = {f"{pod['status']['podIP']}:8000" for pod in chat.pods()}
    wait_until("Envoy has found the picker", lambda: gateway.ask("light", model="other") == [(404, "model_not_found")], 30)
    assert gateway.ask("light", *"ababab") == [(200, None)] * 6
    wait_until("Envoy has logged it", lambda: len(gateway.served()) == 6, 30, gateway.envoy.log)
    first, second = served = gateway.served()[:2]
    assert {first, second} == agents and gateway.served() == served * 3, "both serve, and sessions stay"
    agent = first.partition(":")[0]
    assert gateway.ask("light", host=agent) == [(403, "routers_only")], "a proxy comes to an agent by a router's pick alone"
    assert not gateway.client.reaches(agent, 8000), "nobody else comes to an agent"
    assert not gateway.client.reaches(router["status"]["podIP"], 9002), "nor to the picker"
    assert gateway.envoy.reaches(router["status"]["podIP"], 9002)

    assert gateway.ask("nobody's") == [(401, "invalid_api_key")]
    few = gateway.ask("dim", "", "", "", "", "")
    assert few[0][0] == 200 and few[-1] == (429, "rate_limit_exceeded")
    chat.patch(replicas=0)
    wait_until("no pod is left", lambda: not chat.pods(), 60, chat.explain)
    assert gateway.ask("light") == [(503, "no_backend")]


def apply_envoy(kubectl: Kubectl, pool: Manifest) -> HelperPod:
    """Does what a Gateway's controller does for a route that leads to the pool."""
    asked = pool["spec"]["endpointPickerRef"]
    endpoint = f"{asked['name']}.{kubectl.namespace}.svc.cluster.local:{asked['port']['number']}"
    picker = picker_cluster(endpoint, secure=True, type="STRICT_DNS", dns_lookup_family="V4_ONLY")
    made = config(
        f"0.0.0.0:{PORT}",
        f"0.0.0.0:{ADMIN_PORT}",
        picker,
        original_destinations(),
        fail_open=asked["failureMode"] == "FailOpen",
    )
    command = [
        "envoy",
        "-c",
        "/files/envoy.json",
        "--concurrency",
        "1",
        "--disable-hot-restart",
        "--file-flush-interval-msec",
        "100",
    ]
    probe = {"path": "/ready", "port": ADMIN_PORT}
    return HelperPod(kubectl, "edge", IMAGE, command, {"envoy.json": json.dumps(made)}, labels=OF_GATEWAY, probe=probe)


def leads_to(kubectl: Kubectl) -> Any:
    return kubectl.get("httproute", "chat")["spec"]["rules"][0]["backendRefs"][0].get("kind", "Service")
