"""Keys and values in files outlive the pods that computed them."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, condition, wait_until
from e2e.service.watched import Watched, metric, run_in
from e2e.under_test import ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
TOKENS = 2048
PROMPTS = range(100, 104)
"""A request does not wait for a tier without bound: on a busy machine some of them may compute what could be found."""
CHUNKS = TOKENS // 64
AGENT = 65532
ASK = """
import httpx, json, sys, time
first, count = map(int, sys.argv[2:])
body = {"model": sys.argv[1], "prompt": list(range(first, first + count)), "max_tokens": 8, "temperature": 0}
body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
began, seen, text, usage = time.perf_counter(), None, "", None
with httpx.stream("POST", "http://127.0.0.1:8000/v1/completions", timeout=60, json=body) as answer:
    for line in answer.iter_lines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            seen = seen or time.perf_counter() - began
            text += choice["text"]
print(json.dumps({"ttft": seen, "text": text, "cached": usage["prompt_tokens_details"]["cached_tokens"]}))
"""
FILL = """
import httpx, sys
first, last, count = map(int, sys.argv[2:])
for at in range(first, last):
    body = {"model": sys.argv[1], "prompt": list(range(at, at + count)), "max_tokens": 1}
    httpx.post("http://127.0.0.1:8000/v1/completions", timeout=60, json=body).raise_for_status()
"""
SMALL = 64 << 20
"""Bytes of a folder that has room for the objects of twelve prompts."""


@pytest.fixture
def claim(cluster: ClusterUnderTest, kubectl: Kubectl) -> Iterator[str]:
    """Its volume, a folder of the first node, becomes the pods' by their fsGroup."""
    if cluster.folder is None:
        pytest.skip("needs a folder on a node")
    name = f"kv-{kubectl.namespace}"
    folder = cluster.folder / name
    folder.mkdir()
    kubectl.apply(*volume_and_claim(name, folder))
    yield name
    kubectl("delete", "pv", name, "--wait=false")


@pytest.fixture
def path(cluster: ClusterUnderTest, kubectl: Kubectl) -> str:
    """A folder that both nodes have, as if it were a network's file system; it is its user's to let the pods write there."""
    if cluster.folder is None:
        pytest.skip("needs a folder that both nodes have")
    folder = cluster.folder / f"kv-{kubectl.namespace}"
    folder.mkdir()
    os.chown(folder, AGENT, AGENT)
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    return str(folder)


def volume_and_claim(name: str, folder: Path) -> tuple[Manifest, Manifest]:
    shared: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "storageClassName": "local"}
    node = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}]}
    volume = {"capacity": {"storage": "1Gi"}, "local": {"path": str(folder)}} | shared
    volume["nodeAffinity"] = {"required": {"nodeSelectorTerms": [node]}}
    claim = {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}} | shared
    head = {"apiVersion": "v1", "metadata": {"name": name}}
    return head | {"kind": "PersistentVolume", "spec": volume}, head | {"kind": "PersistentVolumeClaim", "spec": claim}


def ask(kubectl: Kubectl, chat: Watched, pod: str, first: int = 100) -> dict[str, Any]:
    """The tokens `first`, `first` + 1 and so on: prompts of two beginnings have no chunk in common."""
    answer: dict[str, Any] = json.loads(run_in(kubectl, pod, ASK, chat.name, str(first), str(TOKENS)))
    return answer


def of_tier(kubectl: Kubectl, pod: str, tier: str, name: str) -> float:
    """A number of a tier, as that pod says it."""
    return metric(kubectl, pod, f"starling:kv_tier_{name}", tier=tier)


def of_folder(kubectl: Kubectl, pod: str, name: str) -> float:
    return of_tier(kubectl, pod, "filesystem", name)


def only_pod(chat: Watched) -> str:
    (pod,) = chat.pods()
    return str(pod["metadata"]["name"])


def test_a_prompt_is_served_from_the_tier_after_a_rolling_update(service: MakeService, kubectl: Kubectl, claim: str) -> None:
    chat = service(kvCache={"tiers": {"cpu": {"bytes": "64Mi"}, "filesystem": {"bytes": "512Mi", "claim": claim}}})
    chat.wait_ready()
    old = only_pod(chat)
    computed = [ask(kubectl, chat, old, first) for first in PROMPTS]
    assert {each["cached"] for each in computed} == {0}
    wanted = len(PROMPTS) * (CHUNKS - 1)
    wait_until("it is in the tier", lambda: of_folder(kubectl, old, "objects") >= wanted, 150, chat.explain)
    assert of_folder(kubectl, old, "hits_total") == 0

    chat.patch(template={"metadata": {"annotations": {"example.com/restarted": "once"}}})
    chat.wait_ready()
    wait_until("the old pod is gone", lambda: [old] != [pod["metadata"]["name"] for pod in chat.pods()][:1], 150, chat.explain)
    wait_until("one pod is left", lambda: len(chat.pods()) == 1, 150, chat.explain)
    new = only_pod(chat)
    found = [ask(kubectl, chat, new, first) for first in PROMPTS]
    assert new != old
    assert [each["text"] for each in found] == [each["text"] for each in computed]
    assert max(each["cached"] for each in found) >= (CHUNKS - 1) * 64
    wait_until("the hits are counted", lambda: of_folder(kubectl, new, "hits_total") > 0, 30, chat.explain)
    hits = of_folder(kubectl, new, "hits_total")
    assert of_folder(kubectl, new, "errors_total") == 0
    for where, answers in (("computed", computed), (f"in a new pod ({hits:.0f} chunks found)", found)):
        each = ", ".join(f"{1000 * answer['ttft']:.0f} ms ({answer['cached']} cached)" for answer in answers)
        print(f"{TOKENS} tokens, first token, {where}: {each}")


@pytest.mark.whole
def test_replicas_on_both_nodes_use_one_folder(service: MakeService, kubectl: Kubectl, path: str) -> None:
    """What one has computed the other finds; one of them evicts, and when it is killed one does again."""
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    apart["labelSelector"] = {"matchLabels": {"serving.starling.dev/service": "chat"}}
    chat = service(
        replicas=2,
        kvCache={"tiers": {"cpu": {"bytes": "16Mi"}, "filesystem": {"bytes": str(SMALL), "path": path}}},
        template={"spec": {"topologySpreadConstraints": [apart]}},
    )
    chat.wait_ready()
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in chat.pods()}
    assert {pod["spec"]["nodeName"] for pod in chat.pods()} == {"n1", "n2"}
    one, other = uids

    computed = [ask(kubectl, chat, one, first) for first in PROMPTS]
    assert {each["cached"] for each in computed} == {0}
    wanted = len(PROMPTS) * (CHUNKS - 1)
    wait_until("it is in the folder", lambda: of_folder(kubectl, one, "objects") >= wanted, 150, chat.explain)
    found = [ask(kubectl, chat, other, first) for first in PROMPTS]
    assert [each["text"] for each in found] == [each["text"] for each in computed]
    assert max(each["cached"] for each in found) >= (CHUNKS - 1) * 64
    wait_until("the hits are counted", lambda: of_folder(kubectl, other, "hits_total") > 0, 30, chat.explain)

    def evicted(pod: str) -> float:
        return of_folder(kubectl, pod, "evictions_total")

    def bytes_there() -> float:
        return max(of_folder(kubectl, pod, "bytes") for pod in (one, other))

    def fill(pod: str, first: int, last: int) -> None:
        run_in(kubectl, pod, FILL, chat.name, str(first), str(last), str(TOKENS))

    fill(one, 200, 206)
    fill(other, 300, 306)
    wait_until("there is room again", lambda: any(map(evicted, uids)) and bytes_there() <= SMALL, 60, chat.explain)
    (holder,) = (pod for pod in uids if evicted(pod))
    (heir,) = uids.keys() - {holder}

    prompts = itertools.count(400)

    def is_back() -> bool:
        new = [pod for pod in chat.pods() if pod["metadata"]["uid"] not in uids.values()]
        return any(condition(pod, "Ready").get("status") == "True" for pod in new)

    def evicts_again() -> bool:
        """Nothing more is written to a full folder before somebody has the lease, so what is asked meanwhile is not all."""
        fill(heir, prompt := next(prompts), prompt + 1)
        return any(map(evicted, uids)) and bytes_there() <= SMALL

    kubectl("delete", "pod", holder, "--grace-period=0", "--force")
    wait_until("it is ready again", is_back, 150, chat.explain)
    wait_until("one of them evicts", evicts_again, 100, chat.explain)
    assert kubectl.get("pod", heir)["metadata"]["uid"] == uids[heir], "it goes on without the other"
    again = [ask(kubectl, chat, pod, PROMPTS[0])["text"] for pod in (one, other)]
    assert again == [computed[0]["text"]] * 2
    assert [of_folder(kubectl, pod, "errors_total") for pod in (one, other)] == [0, 0]
    print(kubectl("exec", heir, "-c", "agent", "--", "starling", "kv", "verify", "/kv"))
