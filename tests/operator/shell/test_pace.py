"""News of a large service is decided upon together: how long it waits depends on what the last decision took."""

import time

import pytest
from starling_operator.pace import MOST_SECONDS, PAUSE_RATIO, Pace

KEY, OTHER = ("space", "chat"), ("space", "other")


def work(seconds: float) -> None:
    """Keeps the processor busy for so many seconds of its own."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_news_waits_for_a_multiple_of_what_all_parts_of_a_decision_took() -> None:
    pace = Pace()
    pace.begin(KEY)
    for _ in range(2):
        with pace.part(KEY):
            work(0.01)
        work(0.05)  # of others, which it awaits
    assert 0.02 * PAUSE_RATIO <= pace.pause(KEY) < 0.05 * PAUSE_RATIO
    whole = pace.pause(KEY)
    pace.begin(KEY)
    with pace.part(KEY):
        work(0.002)
    assert pace.pause(KEY) == whole, "news that comes while the next decision is made waits as long"
    pace.begin(KEY)
    assert pace.pause(KEY) < whole, "what counts is the last decision"


def test_others_wait_for_nothing_and_nobody_for_long() -> None:
    pace = Pace()
    with pace.part(KEY):
        work(2 * MOST_SECONDS / PAUSE_RATIO)
    assert (pace.pause(KEY), pace.pause(OTHER)) == (MOST_SECONDS, 0.0)
    pace.forget(KEY)
    assert pace.pause(KEY) == 0.0


def test_a_part_that_fails_is_counted() -> None:
    pace = Pace()
    with pytest.raises(ValueError, match="wrong"), pace.part(KEY):
        work(0.01)
        raise ValueError("wrong")
    assert pace.pause(KEY) >= 0.01 * PAUSE_RATIO
