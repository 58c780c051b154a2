"""A store that is full is logged now and then, and tried less and less."""

import pytest
from starling_engine.kv_offload.log_throttle import LOG_INTERVAL
from starling_engine.kv_offload.secondary.store.tier import StoreRoom

LONGEST_PAUSE = 8.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_store_that_stays_full_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """There is no line for each of thousands of values, and more than one in an engine's life."""
    clock = Clock()
    room = StoreRoom("store:50051", clock)
    lines = []
    for _ in range(400):
        room.was_missing()
        clock.now += LONGEST_PAUSE
        lines.append(len(caplog.messages))
    assert lines[0] == 1 and lines[int(LOG_INTERVAL / LONGEST_PAUSE)] == 1
    assert lines[-1] == 1 + int(400 * LONGEST_PAUSE / LOG_INTERVAL)
    assert set(caplog.messages) == {"the store at store:50051 has no room; what it does not take is kept here only"}


def test_one_that_is_full_by_turns_is_logged_as_rarely(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    room = StoreRoom("store:50051", clock)
    for _ in range(100):
        room.was_missing()
        clock.now += 1.0
        assert room.is_expected, "the pause is short again"
        room.was_there()
    assert len(caplog.messages) == 1


def test_it_is_left_alone_for_longer_while_it_stays_full() -> None:
    clock = Clock()
    room = StoreRoom("store:50051", clock)
    pauses = []
    for _ in range(8):
        room.was_missing()
        began = clock.now
        while not room.is_expected:
            clock.now += 0.25
        pauses.append(clock.now - began)
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 8, 8]
