"""Routers before two groups: prompts find what is cached; a pod is killed, nodes are drained, routers go, and no stream notices."""

import random
import time

import pytest

from e2e.service.conftest import MakeService
from e2e.service.disturbances import Disturbances
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.test_drains import DRAIN
from e2e.service.watched import MODEL, HelperPod, Traffic, failures
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
SCRAPER = {"app.kubernetes.io/name": "prometheus"}
"""Pods with it come to agents behind routers, wherever they are."""
EXACT = """
import httpx, sys
from urllib.parse import urljoin
lines = httpx.get(urljoin(sys.argv[1], "/metrics"), timeout=10).text.splitlines()
print(*(line.split()[1] for line in lines if line.startswith("starling:router_exact_prompts_total ")))
"""
CACHED = """
import httpx, itertools, sys
model, salt, *urls = sys.argv[1:]
next_url, cached, prompt = itertools.cycle(urls), 0, 0
for turn in range(4):
    for chat in ("first", "second", "third"):
        said = f"{salt} {chat}: " + "the import statement finds a module and binds it to a name. " * 60 + f"turn {turn}"
        body = {"model": model, "prompt": said, "max_tokens": 1}
        usage = httpx.post(next(next_url) + "/completions", timeout=120, json=body).raise_for_status().json()["usage"]
        cached, prompt = cached + (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0), prompt + usage["prompt_tokens"]
print(cached, prompt)
"""
"""Chats whose turns have a long prefix of their own, and meet the given URLs in turn: tokens that were cached, and all."""


def test_streams_outlive_their_pods_and_the_routers(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service(model={"source": MODEL, "dtype": "float32"}, replicas=2, router={"replicas": 2})
    print(f"two groups behind routers are Ready: {chat.wait_ready():.1f} s")
    assert chat.now["status"]["router"]["ready"] >= 1
    url, pods = chat.url, chat.pods()
    address = pods[0]["status"]["podIP"]
    traffic = Traffic(kubectl, chat, cluster.agent_image, streams=4)
    traffic.wait_for_more(4)
    assert not traffic.reaches(address, 8000), "policies keep strangers out"
    scraper = HelperPod(kubectl, "scraper", cluster.agent_image, ["sleep", "inf"], {}, labels=SCRAPER)
    scraper.wait_ready()
    wait_until("a scraper comes in", lambda: scraper.reaches(address, 8000), 30)
    assert scraper.runs(ASK, address, "chat") == "200 403 403", "agents answer scrapers, and of all others routers alone"
    wait_until("a prompt went by its blocks", lambda: float(traffic.runs(EXACT, url)) > 0, 60, lambda: traffic.runs(EXACT, url))

    routed = hit_tokens(traffic, "routed", url)
    victim = pods[0]["metadata"]
    kubectl("delete", "pod", victim["name"], "--grace-period=0", "--force")
    traffic.wait_for_more(12)
    chat.wait_ready()
    traffic.wait_for_more(8)

    routers = kubectl.find("pods", "serving.starling.dev/router=chat")
    nodes = sorted({pod["spec"]["nodeName"] for pod in [*chat.pods(), *routers]})
    disturbances, began = Disturbances(chat, cluster, random.Random(1)), time.monotonic()
    for node in nodes:
        disturbances.drain(node)
        chat.wait_ready()
        traffic.wait_for_more(4)
    print(f"{nodes} drained in {time.monotonic() - began:.0f} s: {len(disturbances.refused)} evictions", end=", ")
    print(f"the longest refused for {max(disturbances.refused):.1f} s")
    assert not {pod["metadata"]["uid"] for pod in routers} & disturbances.present(), "routers went with their nodes"
    assert max(disturbances.refused) <= DRAIN
    wait_until("what was made ahead is gone", lambda: len(chat.pods()) == 2, 60, chat.explain)

    before = {pod["metadata"]["uid"] for pod in chat.pods()}
    chat.patch(router=None)
    wait_until("the routers are gone", lambda: not kubectl.find("pods", "serving.starling.dev/router=chat"), 90, chat.explain)
    chat.wait_ready()
    traffic.wait_for_more(8)
    assert chat.url == url and {pod["metadata"]["uid"] for pod in chat.pods()} == before
    assert traffic.runs(ASK, chat.pods()[0]["status"]["podIP"], "chat") == "200 200 403", "what is cached is for routers alone"

    of_pods = [f"http://{pod['status']['podIP']}:8000/v1" for pod in chat.pods()]
    in_turn, single = hit_tokens(traffic, "in-turn", *of_pods), hit_tokens(traffic, "single", of_pods[0])
    print(f"hit tokens: {routed:.2f} by the router, {in_turn:.2f} round robin, {single:.2f} on one group")
    assert routed >= 0.9 * single > in_turn, "what one group would find is found on two"

    requests = traffic.stop()
    print(f"{len(requests)} requests")
    assert failures(requests) == []
    texts: dict[str, set[str]] = {}
    for request in requests:
        texts.setdefault(request["prompt"], set()).add(request["text"])
    assert all(len(found) == 1 for found in texts.values()), "equal prompts have equal answers, on whichever pods they were made"


def hit_tokens(traffic: Traffic, salt: str, *urls: str) -> float:
    """The part of all prompts' tokens that was cached."""
    cached, prompt = map(int, traffic.runs(CACHED, "chat", salt, *urls).split())
    return cached / prompt
