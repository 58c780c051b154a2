"""Which backend is picked, and why."""

import pytest
from starling_router.backend import Backend, Backends
from starling_router.picker import Picker, RouterPolicy


def backends(count: int = 3) -> list[Backend]:
    return [Backend(f"pod-{i}", f"http://pod-{i}:8000", i, ready=True) for i in range(count)]


def test_equal_backends_take_turns() -> None:
    ready, picker = backends(), Picker(RouterPolicy())
    names = [pick.backend.name for _ in range(6) if (pick := picker.pick(ready, 100, {}))]
    assert sorted(names[:3]) == sorted(names[3:]) == ["pod-0", "pod-1", "pod-2"]


def test_a_cached_prefix_draws_a_request() -> None:
    picked = Picker(RouterPolicy()).pick(backends(), 1000, {1: 512, 2: 640})
    assert picked is not None
    assert (picked.backend.name, picked.cached, picked.reason) == ("pod-2", 640, "prefix")


def test_a_cached_prefix_draws_no_more_than_twice_what_it_saves() -> None:
    ready, picker = backends(2), Picker(RouterPolicy())
    ready[1].pending = 1100
    picked = picker.pick(ready, 1000, {1: 512})
    assert picked is not None and (picked.backend.name, picked.cached, picked.reason) == ("pod-0", 0, "load")
    ready[1].pending = 1000
    picked = picker.pick(ready, 1000, {1: 512})
    assert picked is not None and picked.backend.name == "pod-1"


def test_a_backend_whose_free_kv_blocks_cannot_hold_the_prompt_is_taken_last() -> None:
    ready, picker = backends(3), Picker(RouterPolicy())
    ready[0].kv_free, ready[1].kv_free, ready[1].open = 999, 1000, 2
    ready[2].open = 3  # it does not say
    picked = picker.pick(ready, 1000, {})
    assert picked is not None and (picked.backend.name, picked.reason) == ("pod-1", "load")
    assert [backend.name for backend in picker.fallbacks(picked, ready, 1000, 2)] == ["pod-2", "pod-0"]
    picked = picker.pick(ready[:1], 1000, {})
    assert picked is not None and picked.backend.name == "pod-0"


def test_what_is_cached_of_a_prompt_needs_no_free_kv_blocks() -> None:
    ready, picker = backends(2), Picker(RouterPolicy())
    ready[0].kv_free = 100
    picked = picker.pick(ready, 1000, {0: 900})
    assert picked is not None and (picked.backend.name, picked.reason) == ("pod-0", "prefix")
    picked = picker.pick(ready, 1001, {0: 900})
    assert picked is not None and (picked.backend.name, picked.reason) == ("pod-1", "load")


def test_the_next_turn_of_a_chat_that_held_most_blocks_stays_where_its_prefix_is() -> None:
    ready, picker = backends(2), Picker(RouterPolicy())
    with ready[0].carrying(900):
        ready[0].kv_free = 50
        picked = picker.pick(ready, 1000, {0: 900})
        assert picked is not None and picked.backend.name == "pod-1"
    picked = picker.pick(ready, 1000, {0: 900})
    assert picked is not None and picked.backend.name == "pod-0"


@pytest.mark.parametrize("field", ["open", "others"])
def test_open_requests_count_as_load(field: str) -> None:
    ready = backends(2)
    setattr(ready[0], field, 2)
    picked = Picker(RouterPolicy()).pick(ready, 10, {})
    assert picked is not None and picked.backend.name == "pod-1"


def test_a_session_stays_until_its_backend_is_full_or_gone() -> None:
    ready, picker = backends(), Picker(RouterPolicy())
    first = picker.pick(ready, 1000, {}, "me")
    assert first is not None
    again = picker.pick(ready, 1000, {}, "me")
    assert again is not None and (again.backend, again.reason) == (first.backend, "session")
    first.backend.open = 5
    other = picker.pick(ready, 1000, {}, "me")
    assert other is not None and other.backend is not first.backend
    left = [backend for backend in ready if backend is not other.backend]
    last = picker.pick(left, 1000, {}, "me")
    assert last is not None and last.reason == "load"


def test_of_equal_backends_the_one_is_picked_that_was_sent_the_beginning_before() -> None:
    """It moves no request to one that is busier."""
    ready, picker = backends(), Picker(RouterPolicy())
    for backend in ready:
        backend.picked = 9 - backend.number
    picked = picker.pick(ready, 1000, {}, begun={0: 256, 1: 512})
    assert picked is not None and (picked.backend.name, picked.cached, picked.reason) == ("pod-1", 0, "load")
    ready[1].open = 1
    picked = picker.pick(ready, 1000, {}, begun={1: 512})
    assert picked is not None and picked.backend.name == "pod-2"


def test_weights_of_zero_leave_reasons_out() -> None:
    ready, picker = backends(2), Picker(RouterPolicy(prefix=0.0, session=0.0))
    ready[1].open = 1
    for _ in range(2):
        picked = picker.pick(ready, 1000, {1: 1000}, "me")
        assert picked is not None and (picked.backend.name, picked.reason) == ("pod-0", "load")
    ready[1].kv_free = 0
    picked = Picker(RouterPolicy(load=0.0)).pick(ready, 1000, {1: 500})
    assert picked is not None and picked.backend.name == "pod-1"


def test_backends_that_were_tried_are_left_out() -> None:
    ready, picker = backends(2), Picker(RouterPolicy())
    picked = picker.pick(ready, 10, {0: 10}, tried=["pod-0"])
    assert picked is not None and picked.backend.name == "pod-1"
    assert picker.pick(ready, 10, {}, tried=["pod-0", "pod-1"]) is None
    assert picker.pick([], 10, {}) is None


def test_what_a_backend_carries_is_counted_until_its_end() -> None:
    backend = backends(1)[0]
    with backend.carrying(100) as first, backend.carrying(50):
        assert (backend.open, backend.pending) == (2, 150)
        first.began()
        first.began()
        assert (backend.open, backend.pending) == (2, 50)
    assert (backend.open, backend.pending) == (0, 0)


def test_backends_keep_their_numbers_and_give_back_those_of_others() -> None:
    known = Backends()
    came, gone = known.set([("a", "http://a"), ("b", "http://b"), ("c", "http://c")])
    assert [(backend.name, backend.number) for backend in came] == [("a", 0), ("b", 1), ("c", 2)] and not gone
    known.all[2].open = 7
    came, gone = known.set([("c", "http://c"), ("d", "http://d"), ("b", "http://elsewhere")])
    assert [(backend.name, backend.number) for backend in came] == [("d", 0), ("b", 1)]
    assert [backend.name for backend in gone] == ["a", "b"]
    assert [(backend.name, backend.open) for backend in known.all] == [("c", 7), ("d", 0), ("b", 0)]
