"""Whose turn it is: by tokens, weights and priorities; and what that does for a light tenant beside a flood."""

import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from starling_router.backend import Backend, Carried
from starling_router.fair_share import FairShare
from starling_router.hold_queue import HoldQueue, has_room

TOKENS_A_SECOND, STEP = 5_000.0, 512
"""Prompt tokens that a server computes, and those of one step."""


@dataclass(eq=False)
class Request:
    number: int
    share: FairShare
    at: float = 0.0
    prompt: int = 1
    output: int = 0
    size: int = 1
    backend: Backend | None = None

    def may_use(self, _: Backend) -> bool:
        return True


def turns(queue: HoldQueue[Request], count: int) -> str:
    """Returns the names of shares in the order of their turns. Each request costs its prompt."""
    names = []
    for _ in range(count):
        request = queue.next()
        assert request is not None
        request.share.charge(request.prompt)
        names.append(request.share.name)
    return "".join(names)


def filled(*shares: tuple[FairShare, int], count: int = 50) -> HoldQueue[Request]:
    """Returns a queue in which each share has requests with so many tokens."""
    queue, numbers = HoldQueue[Request](), itertools.count()
    for share, prompt in shares:
        for _ in range(count):
            queue.put(Request(next(numbers), share, prompt=prompt))
    return queue


def test_turns_are_by_tokens_and_not_by_requests() -> None:
    seen = Counter(turns(filled((FairShare("a"), 100), (FairShare("b"), 300)), 40))
    assert seen["a"] == 30 and seen["b"] == 10


def test_weights_are_parts_of_the_tokens() -> None:
    seen = Counter(turns(filled((FairShare("a", weight=3), 100), (FairShare("b"), 100)), 40))
    assert seen["a"] == 30 and seen["b"] == 10


def test_a_higher_priority_goes_first() -> None:
    assert turns(filled((FairShare("a"), 1), (FairShare("b", priority=1), 100), count=3), 6) == "bbbaaa"


def test_who_was_idle_has_saved_nothing() -> None:
    busy, idle = FairShare("a"), FairShare("b")
    queue = filled((busy, 100))
    turns(queue, 20)
    queue.put(Request(1000, idle, prompt=100))
    queue.put(Request(1001, idle, prompt=100))
    assert turns(queue, 4) == "baba"


def test_who_comes_first_after_others_were_served_has_saved_nothing() -> None:
    """Nobody waits when the idle one comes: it is lifted to the one that went last."""
    busy, idle = FairShare("a"), FairShare("b")
    queue = HoldQueue[Request]()
    for _ in range(10):
        queue.passes(busy)
        busy.charge(100)
    queue.put(Request(0, idle, prompt=100))
    queue.put(Request(1, idle, prompt=100))
    queue.put(Request(2, busy, prompt=100))
    assert turns(queue, 3) == "bab"


@dataclass
class Outcome:
    """First tokens' times by tenant, and the tokens that each was given until the end."""

    waits: dict[str, list[float]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    computed: int = 0


@dataclass
class Server:
    backend: Backend
    free_at: float = 0.0


def simulate(
    requests: Sequence[Request], seconds: float, *, steps: float | None = 0.5, servers: int = 2, slots: int = 16, rate: float = 50.0
) -> Outcome:
    """Sends requests to servers that compute prompts in order of arrival, and give so many tokens a second to each request."""
    outcome, queue, order = Outcome(), HoldQueue[Request](), itertools.count()
    all_servers = [Server(Backend(f"pod-{i}", "", i, ready=True, limit=slots, step=STEP)) for i in range(servers)]
    events: list[tuple[float, int, str, Request | Carried]] = [(each.at, next(order), "came", each) for each in requests]
    heapq.heapify(events)
    carried: dict[int, Carried] = {}

    def send(now: float) -> None:
        while ready := [each for each in all_servers if has_room(each.backend, steps)]:
            request = queue.next()
            if request is None:
                return
            server = min(ready, key=lambda each: each.backend.pending + 256 * each.backend.open)
            backend = request.backend = server.backend
            backend.open, backend.pending = backend.open + 1, backend.pending + request.prompt
            carried[request.number] = Carried(backend, request.prompt)
            request.share.charge(request.prompt)
            server.free_at = max(now, server.free_at) + request.prompt / TOKENS_A_SECOND
            heapq.heappush(events, (server.free_at, next(order), "first", request))

    while events and events[0][0] <= seconds:
        now, _, what, request = heapq.heappop(events)
        assert isinstance(request, Request)
        name = request.share.name
        if what == "came":
            queue.put(request)
        elif what == "first":
            carried[request.number].began()
            outcome.waits.setdefault(name, []).append(now - request.at)
            outcome.tokens[name] += request.prompt
            outcome.computed += request.prompt
            heapq.heappush(events, (now + request.output / rate, next(order), "end", request))
        else:
            request.share.charge(request.output)
            outcome.tokens[name] += request.output
            assert request.backend is not None
            request.backend.open -= 1
        send(now)
    return outcome


def flood(numbers: Iterator[int], share: FairShare, count: int, prompt: int, output: int) -> list[Request]:
    return [Request(next(numbers), share, 0.0, prompt, output) for _ in range(count)]


def light(numbers: Iterator[int], share: FairShare, seconds: int) -> list[Request]:
    """Requests of 2,000 tokens, one each two seconds."""
    return [Request(next(numbers), share, at + 0.37, 2000, 20) for at in range(0, seconds, 2)]


def jain(tokens: Mapping[str, int], weights: Mapping[str, float]) -> float:
    values = [tokens[name] / weight for name, weight in weights.items()]
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def test_a_light_tenant_beside_a_flood_is_served_as_if_alone() -> None:
    alone = simulate(light(itertools.count(), FairShare("light"), 60), 60)
    numbers = itertools.count()
    both = [*flood(numbers, FairShare("flood"), 4000, 400, 40), *light(numbers, FairShare("light"), 60)]
    beside = simulate(both, 60)
    assert statistics.median(beside.waits["light"]) <= 1.5 * statistics.median(alone.waits["light"])


def test_tokens_of_floods_are_by_weight() -> None:
    numbers, weights = itertools.count(), {"a": 1.0, "b": 1.0, "c": 2.0}
    sizes = {"a": (200, 10), "b": (1000, 200), "c": (400, 50)}
    requests = [each for name in weights for each in flood(numbers, FairShare(name, weight=weights[name]), 2000, *sizes[name])]
    outcome = simulate(requests, 60)
    assert jain(outcome.tokens, weights) >= 0.95


def test_the_bound_costs_no_throughput() -> None:
    def computed(steps: float | None) -> int:
        return simulate(flood(itertools.count(), FairShare("flood"), 4000, 400, 10), 30, steps=steps, slots=64).computed

    assert computed(0.5) >= 0.98 * computed(1000.0)
