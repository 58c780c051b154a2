"""A key that is revoked is refused within ten seconds, by agents and by routers, on kubelets with Kubernetes' own settings."""

import base64
import json

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, wait_until
from e2e.service.watched import Watched

pytestmark = pytest.mark.timeout(600)
NAME = "starling-api-keys"
"""By default the operator follows Secrets with this name, and no others."""
SECONDS = 10
SHARED = {"replicas": 1, "tenants": [{"name": "day"}, {"name": "night", "tokensPerMinute": 60000}], "tenantKeysSecret": NAME}
ASK = """
import sys, httpx
url, key, model = sys.argv[1:]
body = {"model": model, "prompt": "A", "max_tokens": 1}
answer = httpx.post(url, timeout=30, headers={"Authorization": "Bearer " + key}, json=body)
print(answer.status_code, answer.headers.get("x-ratelimit-limit-tokens", ""))
"""


def set_keys(kubectl: Kubectl, **keys: str) -> None:
    data = {name: base64.b64encode(f"{key}\n".encode()).decode() for name, key in keys.items()}
    kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "data": data})


def answer(kubectl: Kubectl, chat: Watched, key: str, base_url: str = "") -> str:
    url, pod = (base_url or chat.url) + "/completions", chat.pods()[0]["metadata"]["name"]
    return kubectl("exec", pod, "-c", "agent", "--", "python", "-c", ASK, url, key, chat.name).strip()


def wait_answered(kubectl: Kubectl, chat: Watched, key: str) -> None:
    """Waits until the proxies of nodes have heard of pods that are ready."""
    wait_until("the service's address leads to it", lambda: answer(kubectl, chat, key).startswith("200"), 60, chat.explain)


def wait_refused(kubectl: Kubectl, chat: Watched, key: str) -> None:
    seconds = wait_until("the key is refused", lambda: answer(kubectl, chat, key) == "401", SECONDS, chat.explain)
    print(f"refused after {seconds:.1f} s")


def test_keys_are_asked_for_until_they_are_revoked(service: MakeService, kubectl: Kubectl) -> None:
    set_keys(kubectl, keys="sesame", day="sun", night="moon")
    chat = service(endpoint={"apiKeySecret": {"name": NAME, "key": "keys"}})
    chat.wait_ready()
    before = chat.pods()
    wait_answered(kubectl, chat, "sesame")
    assert (answer(kubectl, chat, "sesame"), answer(kubectl, chat, "guess")) == ("200", "401")
    assert "sesame" not in json.dumps(chat.now)
    set_keys(kubectl, keys="mustard", day="sun", night="moon")
    wait_refused(kubectl, chat, "sesame")
    assert answer(kubectl, chat, "mustard") == "200"
    assert _uids(chat.pods()) == _uids(before)
    assert chat.pods()[0]["status"]["containerStatuses"][0]["restartCount"] == 0

    chat.patch(endpoint={"apiKeySecret": None}, router=SHARED)
    wait_until("the agents that know keys are gone", lambda: not {*_uids(before)} & {*_uids(chat.pods())}, 120, chat.explain)
    chat.wait_ready()
    wait_answered(kubectl, chat, "sun")
    assert [answer(kubectl, chat, key) for key in ("sun", "moon", "mustard")] == ["200", "200 60000", "401"]
    direct = f"http://{chat.pods()[0]['status']['podIP']}:8000/v1"
    assert answer(kubectl, chat, "sun", direct) == "403", "agents know no tenant's key"
    agents = _uids(chat.pods())
    set_keys(kubectl, day="light")
    wait_refused(kubectl, chat, "sun")
    assert [answer(kubectl, chat, key) for key in ("light", "moon")] == ["200", "401"], "a tenant may lose its last key"

    chat.patch(router=SHARED | {"tenants": [{"name": "day", "tokensPerMinute": 1000}, {"name": "night"}]})
    wait_until("the new quota holds", lambda: answer(kubectl, chat, "light") == "200 1000", 60, chat.explain)
    assert _uids(chat.pods()) == agents, "other tenants restart no agent"


def _uids(pods: list[Manifest]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]
