"""The table of results: what a run leaves in the file, and how figures are written."""

import pytest

from bench.gpu.gpu_tests import parse_counts
from bench.gpu.sections import SECTIONS
from bench.gpu.table import NOT_RUN, Row, merge, parse, quantity, section

ORDER = ("limits", "kernels", "serve")


def test_a_run_replaces_its_own_sections_alone():
    first = merge("", {"kernels": "one"}, ORDER)
    second = merge(first, {"serve": "two\n\n### with a heading of its own"}, ORDER)
    assert parse(second) == {"limits": NOT_RUN, "kernels": "one", "serve": "two\n\n### with a heading of its own"}
    assert parse(merge(second, {"kernels": "three"}, ORDER))["kernels"] == "three"


def test_a_section_that_is_no_more_leaves_the_file():
    assert parse(merge(merge("", {"old": "x"}, ("old",)), {}, ORDER)) == dict.fromkeys(ORDER, NOT_RUN)


def test_the_committed_results_name_every_section():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "bench/results/gpu.md").read_text()
    assert tuple(parse(text)) == tuple(SECTIONS)
    assert merge(text, {}, tuple(SECTIONS)) == text


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (Row("copy", "4.31 TB/s"), "| copy | 4.31 TB/s |  |  |  |"),
        (Row("step", "2 ms", "1.8 ms", 0.9, 0.85), "| step | 2 ms | 1.8 ms | 90% | 85%, met |"),
        (Row("step", "2 ms", "1 ms", 0.5, 0.85), "| step | 2 ms | 1 ms | 50% | 85%, **missed** |"),
        (Row("start", "14 s", goal="under 15 s", met=True), "| start | 14 s |  |  | under 15 s, met |"),
        (Row("start", "16 s", goal="under 15 s", met=False), "| start | 16 s |  |  | under 15 s, **missed** |"),
    ],
)
def test_a_row_says_what_was_reached(row, line):
    assert section("here", [row]).splitlines()[-1] == line


def test_a_section_that_failed_keeps_its_figures_and_its_error():
    body = section("here, 5 s", [Row("copy", "4 TB/s")], "it took more than 5 s\n```")
    assert "| copy | 4 TB/s |" in body and "it took more than 5 s" in body
    assert body.count("```") == 2, "an error cannot end its own fence"
    assert parse(merge("", {"limits": body}, ORDER))["limits"] == body


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.312e12, "4.31 TB/s"),
        (788e12, "788 TB/s"),
        (62e-6, "62.0 uB/s"),
        (1.5e-3, "1.50 mB/s"),
        (2.0, "2.00 B/s"),
        (3e-9, "3.00 nB/s"),
    ],
)
def test_quantities_have_three_digits(value, text):
    assert quantity(value, "B/s") == text


def test_counts_of_tests():
    assert parse_counts("....\n3 failed, 40 passed, 2 skipped, 1 warning in 12.34s (0:00:12)") == {
        "failed": 3,
        "passed": 40,
        "skipped": 2,
        "warning": 1,
    }
    assert parse_counts("1 error in 0.1s") == {"error": 1}
    assert parse_counts("nothing ran") == {}
