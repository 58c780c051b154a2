"""A gateway before the agents: a real Envoy asks a service's router where each request goes, and follows it."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from starling_router.epp import EppSettings

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.test_examples import install_gateway_crds
from e2e.service.test_keys import NAME, set_keys
from e2e.under_test import ClusterUnderTest
from tests.router.envoy import BINARY, Envoy, envoy

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BINARY.exists(), reason="`make envoy` installs it, where there is one for the machine"),
]
TENANTS = [{"name": "day"}, {"name": "few", "tokensPerMinute": 16}]
ROUTER = {"replicas": 1, "hold": {"seconds": 2}, "tenants": TENANTS, "tenantKeysSecret": NAME}
MACHINE = "10.192.0.0/12"
"""The nodes' networks, from where this machine speaks to pods."""
ROUTE = {"parentRefs": [{"name": "edge"}], "backend": "InferencePool", "proxies": [{"cidr": MACHINE}]}


async def test_an_envoy_follows_the_routers_picks(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    if cluster.folder is None:
        pytest.skip("an Envoy of this machine reaches the pods of a cluster of our own alone")
    install_gateway_crds(kubectl)
    set_keys(kubectl, day="light", few="dim")
    chat = service(replicas=2, router=ROUTER, endpoint={"route": ROUTE})
    chat.wait_ready()
    wait_until("the route leads to the pool", lambda: leads_to(kubectl) == "InferencePool", 60, chat.explain)
    (router,) = kubectl.find("pods", "serving.starling.dev/router=chat")
    sent: list[dict[str, int]] = []
    agents = {f"{pod['status']['podIP']}:8000" for pod in chat.pods()}
    async with envoy(tmp_path, EppSettings(9002, 9003), sorted(agents), host=router["status"]["podIP"]) as gateway:
        await gateway.sees(1)
        for session in ("a", "b", "a", "b", "a", "b"):
            answer = await ask(gateway.client, "light", session=session)
            assert answer.status_code == 200 and answer.json()["choices"], answer.text
            sent.append(await requests_sent(gateway))
        assert sent[0].keys() | sent[1].keys() == agents, "both serve, and they answer who was picked for"
        assert sent[5] == dict.fromkeys(agents, 3) and sent[2] == {**sent[1], **dict.fromkeys(sent[0], 2)}, "sessions stay"
        async with httpx.AsyncClient(base_url=f"http://{min(agents)}", timeout=60) as direct:
            assert (await ask(direct, "light")).status_code == 403, "nobody else comes to an agent"

        assert await refusal(gateway.client, "nobody's") == (401, "invalid_api_key")
        assert await refusal(gateway.client, "light", model="other") == (404, "model_not_found")
        few = [(await ask(gateway.client, "dim")).status_code for _ in range(4)]
        assert few[0] == 200
        assert await refusal(gateway.client, "dim") == (429, "rate_limit_exceeded")
        chat.patch(replicas=0)
        wait_until("no pod is left", lambda: not chat.pods(), 60, chat.explain)
        assert await refusal(gateway.client, "light") == (503, "no_backend")


async def requests_sent(gateway: Envoy) -> dict[str, int]:
    """Returns how many requests Envoy has sent to each endpoint that got any, as it says itself."""
    lines = [line.split("::") for line in (await gateway.admin.get("/clusters")).text.splitlines()]
    counts = {line[1]: int(line[3]) for line in lines if line[0] == "pool" and line[2:3] == ["rq_total"]}
    return {endpoint: count for endpoint, count in counts.items() if count}


async def ask(client: httpx.AsyncClient, key: str, model: str = "chat", session: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} | ({"X-Session-Token": session} if session else {})
    return await client.post("/v1/completions", json={"model": model, "prompt": "A word", "max_tokens": 4}, headers=headers)


async def refusal(client: httpx.AsyncClient, key: str, model: str = "chat") -> tuple[int, Any]:
    """The status, and the code in the body's error of OpenAI's form."""
    answer = await ask(client, key, model)
    error = answer.json()["error"]
    assert error["message"] and answer.headers["content-type"] == "application/json"
    assert "Retry-After" in answer.headers or answer.status_code not in (429, 503)
    return answer.status_code, error["code"]


def leads_to(kubectl: Kubectl) -> Any:
    return kubectl.get("httproute", "chat")["spec"]["rules"][0]["backendRefs"][0].get("kind", "Service")
