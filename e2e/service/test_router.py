"""Routers in front of two groups: a pod is killed, and then the routers go; no stream notices either."""

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.watched import MODEL, Traffic, failures
from e2e.under_test import ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
ASK = """
import httpx, sys
address, model = sys.argv[1:]
answers = [httpx.get(f"http://{address}:8000/metrics", timeout=10)]
body = {"model": model, "prompt": "A", "max_tokens": 1}
answers.append(httpx.post(f"http://{address}:8000/v1/completions", timeout=30, json=body))
answers.append(httpx.get(f"http://{address}:8000/backend/cache", timeout=10))
print(*(answer.status_code for answer in answers))
"""
EXACT = """
import httpx, sys
from urllib.parse import urljoin
lines = httpx.get(urljoin(sys.argv[1], "/metrics"), timeout=10).text.splitlines()
print(*(line.split()[1] for line in lines if line.startswith("starling:router_exact_prompts_total ")))
"""


def test_streams_outlive_their_pods_and_the_routers(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service(model={"source": MODEL, "dtype": "float32"}, replicas=2, router={"replicas": 2})
    print(f"two groups behind routers are Ready: {chat.wait_ready():.1f} s")
    assert chat.now["status"]["router"]["ready"] >= 1
    url, pods = chat.url, chat.pods()
    address = pods[0]["status"]["podIP"]
    traffic = Traffic(kubectl, chat, cluster.agent_image, streams=4)
    traffic.wait_for_more(4)
    assert traffic.runs(ASK, address, "chat") == "200 403 403", "agents answer scrapers, and of all others routers alone"
    wait_until("a prompt went by its blocks", lambda: float(traffic.runs(EXACT, url)) > 0, 60, lambda: traffic.runs(EXACT, url))

    victim = pods[0]["metadata"]
    kubectl("delete", "pod", victim["name"], "--grace-period=0", "--force")
    traffic.wait_for_more(12)
    chat.wait_ready()
    traffic.wait_for_more(8)

    before = {pod["metadata"]["uid"] for pod in chat.pods()}
    chat.patch(router=None)
    wait_until("the routers are gone", lambda: not kubectl.find("pods", "serving.starling.dev/router=chat"), 90, chat.explain)
    chat.wait_ready()
    traffic.wait_for_more(8)
    assert chat.url == url and {pod["metadata"]["uid"] for pod in chat.pods()} == before
    assert traffic.runs(ASK, chat.pods()[0]["status"]["podIP"], "chat") == "200 200 403", "what is cached is for routers alone"

    requests = traffic.stop()
    print(f"{len(requests)} requests")
    assert failures(requests) == []
    texts: dict[str, set[str]] = {}
    for request in requests:
        texts.setdefault(request["prompt"], set()).add(request["text"])
    assert all(len(found) == 1 for found in texts.values()), "equal prompts have equal answers, on whichever pods they were made"
