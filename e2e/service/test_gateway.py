"""A gateway before the agents: an Envoy in a pod asks a service's router where each request goes, and follows it.

Where the router is killed, it fails open: agents check keys then.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, wait_until
from e2e.service.test_examples import install_gateway_crds
from e2e.service.test_keys import NAME, set_keys
from e2e.service.watched import HelperPod, Traffic, Watched, failures, records
from e2e.under_test import ClusterUnderTest
from tests.router.envoy import BINARY, config, listed_pool, original_destinations, picker_cluster

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
KEYS = {"name": NAME, "key": "keys"}
NO_PICKER = 2.0
"""Seconds in which Envoy may still ask a picker that was killed. It does not have a body again that it has sent there."""
STRANGER = """
import httpx, itertools, json, sys, time
url, model = sys.argv[1:]
body = {"model": model, "prompt": "A word", "max_tokens": 4}
for headers in itertools.cycle([{}, {"Authorization": "Bearer nobody's"}]):
    at = time.time()
    status = httpx.post(url + "/completions", timeout=60, json=body, headers=headers).status_code
    print(json.dumps({"at": at, "seconds": time.time() - at, "status": status, "has_key": bool(headers)}), flush=True)
    time.sleep(0.1)
"""
"""Asks without a key, and with a wrong one, in turn and without an end."""


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
        """Returns the endpoints of the answers with 200 so far."""
        return [endpoint for status, endpoint, _ in logged(self.envoy) if status == "200"]


def test_an_envoy_in_a_pod_follows_the_routers_picks(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    set_keys(kubectl, day="light", few="dim")
    client = HelperPod(kubectl, "client", IMAGE, ["sleep", "inf"], {})
    chat, envoy = behind_envoy(cluster, service, kubectl, router=ROUTER, endpoint={"route": ROUTE})
    gateway = Gateway(envoy, client)
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


def test_requests_with_a_key_go_on_where_the_picker_is_killed(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--whole"):
        pytest.skip("runs with --whole: on a machine that was busy with other work, Envoy found no picker for a minute")
    set_keys(kubectl, keys="sesame")
    endpoint = {"apiKeySecret": KEYS, "route": ROUTE | {"failureMode": "FailOpen"}}
    chat, envoy = behind_envoy(cluster, service, kubectl, router={"replicas": 1}, endpoint=endpoint)
    url = f"http://{envoy.status['podIP']}:{PORT}/v1"
    traffic = Traffic(kubectl, chat, cluster.agent_image, key="sesame", url=url)
    stranger = HelperPod(kubectl, "stranger", IMAGE, ["python", "-c", STRANGER, url, chat.name], {})
    wait_until("Envoy follows picks", lambda: picked(logged(envoy)) >= 4, 60, envoy.log)
    wait_until("the picker refuses", lambda: ["401", "-", "-"] in logged(envoy), 60, envoy.log)

    (router,) = kubectl.find("pods", "serving.starling.dev/router=chat")
    killed_at, before = time.time(), len(logged(envoy))

    def agents_alone_answer() -> bool:
        cluster.kill(router["metadata"]["uid"], "starling router")  # the kubelet starts it again
        unpicked = [(status, endpoint != "-") for status, endpoint, pick in logged(envoy)[before:] if pick == "-"]
        return unpicked.count(("200", True)) >= 4 and unpicked.count(("401", True)) >= 4

    seconds = wait_until("agents serve and refuse without a pick", agents_alone_answer, 60, envoy.log)
    assert leads_to(kubectl) == "InferencePool", "a Gateway is to fail open, not to ask routers that are gone"
    alone = len(logged(envoy))
    back = wait_until("Envoy follows picks again", lambda: picked(logged(envoy)[alone:]) >= 4, 120, envoy.log)
    requests, refused = traffic.stop(), records(stranger.log())

    def is_cut(request: Manifest) -> bool:
        began: float = request["at"]
        return began - NO_PICKER < killed_at < began + float(request["seconds"])

    failed = failures(requests)
    print(f"no picker for {seconds:.1f} s, picks {back:.1f} s later; {len(failed)} of {len(requests)} requests cut by the kill")
    assert not [request for request in failed if not is_cut(request)]
    assert {request["has_key"] for request in refused} == {True, False}
    assert not [request for request in refused if request["status"] != 401 and not (request["status"] == 503 and is_cut(request))]


def behind_envoy(cluster: ClusterUnderTest, service: MakeService, kubectl: Kubectl, **spec: Any) -> tuple[Watched, HelperPod]:
    """Returns a service of two groups that serves, and the pod of an Envoy before it."""
    if cluster.folder is None:
        pytest.skip("only thin images have an Envoy")
    install_gateway_crds(kubectl)
    chat = service(replicas=2, **spec)
    wait_until("there is a pool", lambda: bool(kubectl.get("inferencepool", "chat")), 60, chat.explain)
    envoy = apply_envoy(kubectl, kubectl.get("inferencepool", "chat"))
    chat.wait_ready()
    wait_until("the route leads to the pool", lambda: leads_to(kubectl) == "InferencePool", 60, chat.explain)
    envoy.wait_ready()
    return chat, envoy


def logged(envoy: HelperPod) -> list[list[str]]:
    """Returns status, endpoint and pick of each answer so far, as Envoy has logged them; `-` for none."""
    lines = [line.split() for line in envoy.log().splitlines()]
    return [line for line in lines if len(line) == 3 and line[0].isdigit()]


def picked(answers: list[list[str]]) -> int:
    """Returns how many answers with 200 came from the endpoint that was picked."""
    return sum(status == "200" and endpoint == pick for status, endpoint, pick in answers)


def apply_envoy(kubectl: Kubectl, pool: Manifest) -> HelperPod:
    """Does what a Gateway's controller does for a route that leads to the pool."""
    asked = pool["spec"]["endpointPickerRef"]
    endpoint = f"{asked['name']}.{kubectl.namespace}.svc.cluster.local:{asked['port']['number']}"
    by_dns: dict[str, Any] = {"type": "STRICT_DNS", "dns_lookup_family": "V4_ONLY"}
    picker, fail_open = picker_cluster(endpoint, secure=True, **by_dns), asked["failureMode"] == "FailOpen"
    agents = f"{pool['metadata']['name']}-backends.{kubectl.namespace}.svc.cluster.local:{pool['spec']['targetPorts'][0]['number']}"
    # Who fails open has to know the endpoints by itself.
    endpoints = listed_pool([agents], **by_dns) if fail_open else original_destinations()
    made = config(f"0.0.0.0:{PORT}", f"0.0.0.0:{ADMIN_PORT}", picker, endpoints, fail_open=fail_open)
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
