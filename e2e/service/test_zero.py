"""To zero and back: nobody asks, so no pod is left; then many ask at once, and all are answered by one start.

Twice: the second time it is known how long a start takes. With --whole forty times, and after every other one single requests come
for a while, also as its group goes. Then it sleeps in place of going to zero, and the same pod wakes.
"""

import json
import random
import time

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, condition, wait_until
from e2e.service.watched import Watched

pytestmark = pytest.mark.timeout(10800)
REQUESTS = 200
IDLE = 10
ASK = """
import concurrent.futures, json, sys, threading, urllib.error, urllib.request
url, model, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

def ask(number):
    fields = {"model": model, "prompt": "A", "max_tokens": 8, "temperature": 0, "stream": number % 2 == 1}
    request = urllib.request.Request(url + "/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=280) as answer:
            text = answer.read().decode()
    except Exception as error:
        return repr(error)
    return "answered" if '"finish_reason"' in text and '"error"' not in text else text

def look():
    while not answered.wait(0.5):
        try:
            urllib.request.urlopen(url + "/responses/of-nobody", timeout=30)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                told.append([error.headers["X-Starling-Phase"], error.read().decode()])

answered, told = threading.Event(), []
looking = threading.Thread(target=look)
looking.start()
with concurrent.futures.ThreadPoolExecutor(count) as pool:
    answers = [*pool.map(ask, range(count))]
answered.set()
looking.join()
print(json.dumps([answers, told]))
"""
LIST = """
import json, sys, urllib.request
print([card["id"] for card in json.load(urllib.request.urlopen(sys.argv[1] + "/models", timeout=30))["data"]])
"""


def in_a_router(kubectl: Kubectl, program: str, *arguments: str, check: bool = True) -> str:
    """Output of a Python program in a router: the pod of the service that is always there."""
    return kubectl("exec", "deployment/chat-router", "--", "python", "-c", program, *arguments, check=check).strip()


def wait_for_zero(chat: Watched) -> float:
    def is_at_zero() -> bool:
        return condition(chat.now, "Ready").get("reason") == "Idle" and not chat.pods()

    return wait_until("no pod is left", is_at_zero, 120, chat.explain)


def start_seconds(chat: Watched) -> float:
    """Seconds that starts take, from the status, which the operator writes a moment after the router has a group; 0 before."""
    return float((chat.now["status"].get("scaling") or {}).get("startSeconds") or 0)


def woken(kubectl: Kubectl) -> set[str]:
    """Names of the events of starts. The API server keeps each for an hour, which forty cycles may take longer than."""
    return {event["metadata"]["name"] for event in kubectl.find("events") if event.get("reason") == "Woken"}


def trickle(kubectl: Kubectl, chat: Watched, chance: random.Random) -> None:
    """Asserts that a request and a stream are answered, a few times about when the service is idle, and then as its group goes."""
    for _ in range(3):
        time.sleep(IDLE * chance.uniform(0.8, 1.6))
        assert_answered(kubectl, chat, 2)
    wait_until("its group goes", lambda: any(is_going(pod) for pod in chat.pods()), 120, chat.explain)
    time.sleep(chance.uniform(0, 1))
    assert_answered(kubectl, chat, 2)


def is_going(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def assert_answered(kubectl: Kubectl, chat: Watched, count: int) -> list[list[str]]:
    """Sends so many requests at once. Returns phases and errors that others were told meanwhile."""
    answers, told = json.loads(in_a_router(kubectl, ASK, chat.url, "chat", str(count)))
    assert answers == ["answered"] * count, answers
    return list(told)


def test_it_goes_to_zero_and_requests_at_once_wake_it_once(
    service: MakeService, kubectl: Kubectl, request: pytest.FixtureRequest
) -> None:
    scaling, drain = {"idleSeconds": IDLE}, {"acceptSeconds": 1}
    chat = service(replicas=0, router={"replicas": 2, "hold": {"seconds": 300}}, scaling=scaling, drain=drain)
    wait_for_zero(chat)
    kubectl("rollout", "status", "deployment/chat-router", "--timeout=180s")
    before = chat.now

    def lists_the_model() -> bool:
        return in_a_router(kubectl, LIST, chat.url, check=False) == "['chat']"

    # A node's proxy refuses connections until it has heard of the routers that are ready.
    wait_until("the service's address leads to a router", lists_the_model, 30, chat.explain)
    cycles, starts = 40 if request.config.getoption("--whole") else 2, set[str]()
    for cycle in range(cycles):
        if cycle == cycles - 1:
            # While it is at zero: it is about to go there again soon after its answers, perhaps before it could be told to sleep.
            assert_unwritten(chat, before)
            chat.patch(scaling=scaling | {"standby": "asleep", "sleepLevel": 2})
            before = chat.now
        told = assert_answered(kubectl, chat, REQUESTS)
        wait_until("the status tells what the start took", lambda: start_seconds(chat) > 0, 30, chat.explain)
        print(f"{REQUESTS} requests at zero are answered; the start took {start_seconds(chat)} s")
        assert len(chat.pods()) == 1
        assert len(woken(kubectl) - starts) == 1, "a list of models wakes nothing, and requests at once are one start"
        assert any(phase == "Progressing" for phase, _ in told), told
        assert not cycle or any("try again in about" in text for _, text in told), told
        if cycle < cycles - 1:
            if cycle % 2:
                trickle(kubectl, chat, random.Random(cycle))
            print(f"at zero again: {wait_for_zero(chat):.1f} s")
        starts = woken(kubectl)

    (pod,) = chat.pods()
    print(f"asleep: {wait_until('it sleeps', lambda: sleeps(chat), 120, chat.explain):.1f} s")
    assert lists_the_model()
    assert woken(kubectl) <= starts, "a list of models wakes nothing"
    assert_answered(kubectl, chat, REQUESTS)
    wait_until(
        "the status tells what the wake took", lambda: bool(chat.now["status"]["scaling"].get("startedAt")), 30, chat.explain
    )
    print(f"{REQUESTS} requests are answered by a pod that slept; it took {start_seconds(chat)} s")
    assert [each["metadata"]["uid"] for each in chat.pods()] == [pod["metadata"]["uid"]] and not restarts(chat)
    assert len(woken(kubectl) - starts) == 1
    assert_unwritten(chat, before)


def assert_unwritten(chat: Watched, before: Manifest) -> None:
    """Asserts that nobody has written the service's spec since then."""
    after = chat.now
    assert after["spec"] == before["spec"] and after["metadata"]["generation"] == before["metadata"]["generation"]


def sleeps(chat: Watched) -> bool:
    """Says whether a service sleeps: pods are there, and nothing is left to do."""
    service = chat.now
    return condition(service, "Ready").get("reason") == "Asleep" and condition(service, "Reconciling").get("status") == "False"


def restarts(chat: Watched) -> int:
    return sum(each["restartCount"] for pod in chat.pods() for each in pod["status"].get("containerStatuses", ()))
