"""Which goals of the race of routers are missed?"""

from dataclasses import replace

import pytest

from bench.router_goals import Figures, missed

GOOD = Figures(hits=1.0, median=0.16, high=0.33, to_round_robin=0.11, balance=1.0)
PEERS = {"other": replace(GOOD, hits=1.002, median=0.15)}


def test_a_race_like_those_that_are_recorded_meets_all() -> None:
    assert missed(GOOD, PEERS) == []


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (replace(GOOD, to_round_robin=0.51), "first tokens take 0.51 of round robin's median; the goal is 0.5"),
        (replace(GOOD, balance=1.31), "most computed tokens are 1.31 of the mean; the goal is 1.3"),
        (replace(GOOD, hits=0.96), "other has more hit tokens: 1.002 to 0.960"),
        (replace(GOOD, median=0.19), "other is faster: 150 ms to 190"),
    ],
)
def test_a_goal_is_missed(own: Figures, says: str) -> None:
    assert missed(own, PEERS) == [says]


def test_each_goal_that_is_missed_is_said() -> None:
    assert missed(replace(GOOD, hits=0.8, balance=2.0), {}) == [
        "0.800 of one server's hit tokens; the goal is 0.9",
        "most computed tokens are 2.00 of the mean; the goal is 1.3",
    ]
