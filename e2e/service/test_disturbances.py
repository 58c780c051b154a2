"""Nodes are drained, the spec changes, operator, agents and routers are killed, one after another, under many streams.

`--disturbances SECONDS` does all of them for so long, `--whole` for twenty minutes; the order is `--disturbances-seed`'s, and
`--disturbances-streams` are open at once. It is left out without either: on two busy processors streams take longer than a drain.
"""

import random
import time
from collections import Counter

import pytest

from e2e.service.conftest import MakeService
from e2e.service.disturbances import Disturbances
from e2e.service.kubectl import Kubectl, Manifest, wait_until
from e2e.service.test_drains import DRAIN
from e2e.service.watched import MODEL, Traffic, Watched, failures, metric
from e2e.under_test import ClusterUnderTest

pytestmark = pytest.mark.timeout(3600)
WHOLE_SECONDS = 1200
CUT = ("APIConnectionError: ", "ReadError: ", "RemoteProtocolError: ")
"""How the client says that a connection was refused, or ended before its answer did."""
WITHOUT_A_ROUTER = 2.0
"""Seconds in which clients may still be sent to a router that was killed."""


def test_no_stream_notices_what_happens_to_its_service(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest, request: pytest.FixtureRequest
) -> None:
    option = request.config.getoption
    seed, least = option("--disturbances-seed"), option("--disturbances") or WHOLE_SECONDS * option("--whole")
    streams = option("--disturbances-streams")
    if not least:
        pytest.skip("runs with --disturbances SECONDS or --whole")
    chat = service(
        model={"source": MODEL, "dtype": "float32"}, replicas=2, router={"replicas": 2}, recovery={"restartBudget": 1000}
    )
    chat.wait_ready()
    traffic = Traffic(kubectl, chat, cluster.agent_image, streams=streams)
    traffic.wait_for_more(streams * 2)
    disturbances, began, done = Disturbances(chat, cluster, random.Random(seed)), time.time(), Counter[str]()
    for disturb in disturbances.rounds():
        if done[disturb.__name__] and time.time() - began > least:
            break
        started = time.time()
        disturb()
        done[disturb.__name__] += 1
        print(f"{started - began:6.1f} s: {disturb.__name__} took {time.time() - started:.1f} s", flush=True)
    chat.wait_ready()
    requests = traffic.stop()

    cut = [request for request in requests if is_cut_by(disturbances.killed_routers, request)]
    print(f"seed {seed}, {time.time() - began:.0f} s, {sum(done.values())} disturbances: {len(requests)} requests")
    print(f"{len(cut)} cut with {len(disturbances.killed_routers)} killed routers")
    print(f"longest refusal of {len(disturbances.refused)} evictions: {max(disturbances.refused):.1f} s")
    print(f"longest request: {max(request['seconds'] for request in requests):.1f} s")
    failed = [{**request, "at": request["at"] - began} for request in failures(requests) if request not in cut]
    assert not failed, "\n".join(map(str, failed))
    assert differing(requests, began, streams) == {}
    assert max(disturbances.refused) <= DRAIN
    assert_nothing_is_left_by(disturbances, chat, cluster)


def is_cut_by(kills: list[float], request: Manifest) -> bool:
    """Whether a killed router explains it: the connection was lost, and was open at the kill or made right after."""
    is_cut = str(request["error"]).startswith(CUT)
    ended = request["at"] + request["seconds"]
    return is_cut and any(request["at"] <= kill + WITHOUT_A_ROUTER and kill <= ended for kill in kills)


def differing(requests: list[Manifest], disturbed_since: float, streams: int) -> dict[str, set[str]]:
    """Prompts that were not always answered alike, before the first disturbance and since."""
    whole = [request for request in requests if request["error"] is None]
    undisturbed = {request["prompt"] for request in whole if request["at"] + request["seconds"] < disturbed_since}
    assert len(undisturbed) >= streams
    texts: dict[str, set[str]] = {}
    for request in whole:
        texts.setdefault(request["prompt"], set()).add(request["text"])
    return {prompt: found for prompt, found in texts.items() if len(found) > 1}


def assert_nothing_is_left_by(disturbances: Disturbances, chat: Watched, cluster: ClusterUnderTest) -> None:
    """Streams that would go on for long end in the engines when the routers that hold them are killed."""

    def running() -> float:
        return sum(metric(chat.kubectl, pod["metadata"]["name"], "vllm:num_requests_running") for pod in chat.pods())

    traffic = Traffic(chat.kubectl, chat, cluster.agent_image, streams=8, tokens=3000)
    wait_until("the streams run", lambda: running() == 8, 60, chat.explain)
    traffic.close()
    disturbances.kill_all_routers()
    took = wait_until("nothing is left in the engines", lambda: running() == 0, 10, lambda: str(running()))
    print(f"engines are idle {took:.1f} s after their routers were killed")
