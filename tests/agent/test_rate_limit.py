"""The rate limit's token buckets, with a fake clock."""

import pytest
from starling_agent.http import rate_limit
from starling_agent.http.rate_limit import Buckets
from starling_agent.settings import RateLimit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_burst_is_allowed_and_then_the_rate(clock):
    buckets = Buckets(RateLimit(3, 6.0), clock)
    assert [buckets.take(b"a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take(b"a") == pytest.approx(2.0)
    clock.now += 1.0
    assert buckets.take(b"a") == pytest.approx(1.0)
    clock.now += 1.0
    assert buckets.take(b"a") == 0
    assert buckets.take(b"a") > 0


def test_a_bucket_holds_no_more_than_the_limit(clock):
    buckets = Buckets(RateLimit(2, 1.0), clock)
    buckets.take(b"a")
    clock.now += 1000
    assert [buckets.take(b"a") > 0 for _ in range(3)] == [False, False, True]


def test_clients_do_not_share_a_bucket(clock):
    buckets = Buckets(RateLimit(1, 60.0), clock)
    assert buckets.take(b"a") == 0
    assert buckets.take(b"b") == 0
    assert buckets.take(b"a") > 0


def test_many_clients_do_not_fill_the_memory(clock, monkeypatch):
    monkeypatch.setattr(rate_limit, "MAX_BUCKETS", 10)
    buckets = Buckets(RateLimit(1, 60.0), clock)
    for i in range(100):
        clock.now += 0.1
        assert buckets.take(f"{i}".encode()) == 0
    assert len(buckets._buckets) <= 10
    assert buckets.take(b"99") > 0, "the newest are remembered"
