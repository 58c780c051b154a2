"""Which request waits, which goes on next, and how many try."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from starling_router import hold_queue
from starling_router.backend import Backend
from starling_router.fair_share import FairShare
from starling_router.hold_queue import FIRST_TRIES, HoldPolicy, HoldQueue

EVERYBODY = FairShare()


@dataclass(eq=False)
class Request:
    number: int
    size: int = 10
    pod: str | None = None
    share: FairShare = field(default=EVERYBODY)

    def may_use(self, backend: Backend) -> bool:
        return self.pod in (None, backend.name)


def test_requests_go_on_in_order_of_arrival_and_keep_their_places() -> None:
    queue, made = HoldQueue[Request](), [Request(number) for number in range(4)]
    for number in (2, 0, 3, 1):
        queue.put(made[number])
    assert (len(queue), queue.held(EVERYBODY), queue.held(None)) == (4, (4, 40), (4, 40))
    first = queue.next()
    assert first is made[0]
    assert queue.next() is made[1]
    queue.put(first)
    assert [queue.next(), queue.next(), queue.next(), queue.next()] == [made[0], made[2], made[3], None]
    assert (len(queue), queue.held(EVERYBODY)) == (0, (0, 0))


def test_a_request_that_is_forgotten_has_no_turn() -> None:
    queue, made = HoldQueue[Request](), [Request(number) for number in range(3)]
    for request in made:
        queue.put(request)
    assert queue.next() is made[0]
    for request in (made[0], made[1], made[1]):  # the first one's turn has come already
        queue.forget(request)
    assert (queue.held(EVERYBODY), queue.next(), queue.next()) == ((1, 10), made[2], None)


def test_a_request_for_another_backend_stands_in_nobody_s_way() -> None:
    queue, pinned, free = HoldQueue[Request](), Request(0, pod="pod-1"), Request(1)
    queue.put(pinned)
    queue.put(free)
    first, second = (Backend(f"pod-{i}", f"http://pod-{i}:8000", i) for i in range(2))
    assert queue.has(first) and queue.has(second)
    given = [queue.next(lambda request, to=to: request.may_use(to)) for to in (first, first, second)]  # type: ignore[misc]
    assert given == [free, None, pinned]
    assert not queue.has(first)


@pytest.mark.parametrize(
    ("requests", "size", "bound"),
    [(1, 1, None), (3, 100, None), (4, 1, "requests"), (3, 101, "bytes"), (4, 101, "requests"), (1, 101, "bytes")],
)
def test_bounds(requests: int, size: int, bound: str | None) -> None:
    assert HoldPolicy(requests=3, bytes=100).exceeded(requests, size) == bound


def test_tenants_have_equal_parts_of_the_bounds() -> None:
    policy = HoldPolicy(requests=9, bytes=90)
    assert [policy.exceeded(3, 30, 3), policy.exceeded(4, 30, 3), policy.exceeded(3, 31, 3)] == [None, "requests", "bytes"]


EVENTS: dict[str, Callable[[Backend], object]] = {
    "ready": hold_queue.on_ready,
    "sent": hold_queue.on_sent,
    "taken": hold_queue.on_taken,
    "refused": lambda backend: hold_queue.on_refused(backend, 1),
    "long": lambda backend: hold_queue.on_refused(backend, 100),
    "ended": hold_queue.on_ended,
    "due": hold_queue.on_due,
    "room": lambda backend: hold_queue.on_room(backend, 30),
    "none": lambda backend: hold_queue.on_room(backend, -2),
}


@pytest.mark.parametrize(
    ("events", "tries", "full"),
    [
        ("ready sent sent sent", [FIRST_TRIES, 7, 6, 5], False),
        ("ready taken taken", [FIRST_TRIES, 10, 12], False),
        ("ready taken refused taken", [FIRST_TRIES, 10, 0, 0], True),
        ("ready refused ended sent taken ended", [FIRST_TRIES, 0, 1, 0, 0, 1], False),
        ("ready refused due sent taken taken refused", [FIRST_TRIES, 0, 1, 0, 2, 4, 0], True),
        ("ready refused ready taken", [FIRST_TRIES, 0, FIRST_TRIES, 10], False),
        ("ready refused room sent", [FIRST_TRIES, 0, 30, 29], False),
        ("ready refused none", [FIRST_TRIES, 0, 0], True),
        ("ready long sent", [FIRST_TRIES, 1, 0], True),
    ],
)
def test_as_many_try_as_may_find_room(events: str, tries: list[int], full: bool) -> None:
    backend, seen = Backend("pod-0", "http://pod-0:8000", 0, ready=True), []
    for event in events.split():
        EVENTS[event](backend)
        seen.append(backend.tries)
    assert (seen, backend.full) == (tries, full)


def test_a_short_prompt_may_fit_where_a_long_one_did_not() -> None:
    backend = Backend("pod-0", "http://pod-0:8000", 0, ready=True, open=3)
    hold_queue.on_refused(backend, 1000)
    may_try = [hold_queue.may_try(backend, tokens, waited=True) for tokens in (1000, 501, 500)]
    assert may_try == [False, False, True]


def test_an_idle_backend_is_tried_at_once() -> None:
    backend = Backend("pod-0", "http://pod-0:8000", 0, ready=True)
    assert hold_queue.may_try(backend, 10, waited=True)
    backend.others = 1
    assert not hold_queue.may_try(backend, 10, waited=True)
    assert hold_queue.may_try(backend, 10, waited=False)


@pytest.mark.parametrize(
    ("state", "room"),
    [
        ({"pending": 199, "step": 100, "limit": 9, "open": 8}, True),
        ({"pending": 200, "step": 100, "limit": 9, "open": 8}, False),
        ({"pending": 199, "step": 100, "limit": 9, "open": 8, "others": 1}, False),
        ({"pending": 10**6}, True),
        ({"limit": 0}, False),
    ],
)
def test_a_backend_has_so_many_steps_of_prompts_and_so_many_requests(state: dict[str, int], room: bool) -> None:
    backend = Backend("pod-0", "http://pod-0:8000", 0, ready=True, **state)  # type: ignore[arg-type]
    assert hold_queue.has_room(backend, 2.0) == room
    assert hold_queue.has_room(backend, None)


@pytest.mark.parametrize(
    ("total", "ready", "full", "text"),
    [
        (0, 0, 0, "this router has no servers"),
        (1, 0, 0, "of 1 servers 1 is not ready"),
        (5, 3, 3, "of 5 servers 2 are not ready, 3 are full"),
        (5, 3, 1, "of 5 servers 2 are not ready, 1 is full, 2 are busy with requests before it"),
    ],
)
def test_words_of_what_was_seen(total: int, ready: int, full: int, text: str) -> None:
    assert hold_queue.seen(total, ready, full) == text
