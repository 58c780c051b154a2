"""How busy a GPU was, from a trace of its kernels."""

import pytest

from bench.gpu.busy import EDGE, Span, busy_share, intervals, kernels, longest_gap
from bench.gpu.profile import Use, uses


def event(begin: float, seconds: float, **more):
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": begin * 1e6, "dur": seconds * 1e6, **more}


def test_kernels_alone_count():
    events = [
        event(2, 1),
        event(1, 0.5),
        event(0, 9, cat="cpu_op"),
        event(0, 9, cat="gpu_memcpy"),
        {"ph": "M", "name": "process_name"},
        event(0, 9, ph="s"),
    ]
    assert kernels({"traceEvents": events}) == [(1, 1.5, "k"), (2, 3, "k")]
    assert intervals(kernels({"traceEvents": events})) == [(1, 1.5), (2, 3)]


def test_a_gpu_that_never_waits():
    assert busy_share([(at, at + 1) for at in range(10)]) == pytest.approx(1.0)


def test_a_gpu_that_waits_half_of_the_time():
    assert busy_share([(at / 100, at / 100 + 0.005) for at in range(1000)]) == pytest.approx(0.5, abs=0.01)


def test_kernels_that_overlap_count_once():
    assert busy_share([(0, 10), (2, 3), (2.5, 6)]) == pytest.approx(1.0)
    assert busy_share([(0, 4), (1, 2), (6, 10)]) == pytest.approx((10 * (1 - 2 * EDGE) - 2) / (10 * (1 - 2 * EDGE)))


def test_the_edges_are_left_out():
    assert busy_share([(0, 0.1), (1, 9), (9.9, 10)]) == pytest.approx(8 / 10 / (1 - 2 * EDGE), rel=0.15)
    assert busy_share([(0, 0.01), (EDGE * 10, 10 - EDGE * 10), (9.99, 10)]) == pytest.approx(1.0)


def test_no_kernels_say_nothing():
    assert busy_share([]) is None


def test_short_gaps_may_count_as_busy() -> None:
    intervals = [(at / 100, at / 100 + 0.008) for at in range(1000)]
    assert busy_share(intervals) == pytest.approx(0.8, abs=0.01)
    assert busy_share(intervals, 0.001) == pytest.approx(0.9, abs=0.01)
    assert busy_share(intervals, 0.005) == pytest.approx(1.0)
    assert longest_gap([]) == 0


def test_the_longest_gap():
    assert longest_gap([(0, 5), (1, 2), (5.5, 6), (6.1, 7)]) == pytest.approx(0.5)


def test_a_profile_says_which_kernels_take_the_time_and_what_waits_before_them():
    spans = [Span(0, 1, "a"), Span(1, 5, "b"), Span(5.5, 6, "a"), Span(5.6, 5.7, "c")]
    assert uses(spans) == [Use("b", 4, 1, 0), Use("a", 1.5, 2, 0.5), Use("c", pytest.approx(0.1), 1, 0)]
    assert uses([]) == []
