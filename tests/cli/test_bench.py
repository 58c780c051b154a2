"""Numbers that benchmarks compute from their times."""

import itertools

import pytest
from starling_cli.benchmark.records import Record, Spread, parse_goals, percentile, summarize
from starling_cli.benchmark.workload import arrivals, prompts


def record(ttft=0.1, latency=1.0, output=10, **more):
    return Record(0.0, ttft=ttft, latency=latency, prompt_tokens=5, output_tokens=output, gaps=[0.1] * (output - 1), **more)


def test_rates():
    summary = summarize([record(), record(), record(error="500: no")], seconds=4.0)
    assert (summary.completed, summary.failed) == (2, 1)
    assert summary.request_rate == 0.5
    assert summary.output_rate == 5.0
    assert summary.total_rate == 7.5
    assert summary.errors == {"500: no": 1}
    assert summary.goodput is None


def test_time_per_output_token_leaves_out_the_first():
    assert record(ttft=0.1, latency=1.0, output=10).tpot == pytest.approx(0.1)
    assert record(output=1).tpot is None


def test_goodput_counts_requests_that_meet_every_goal():
    records = [record(ttft=0.4), record(ttft=0.6), record(latency=3.0), record(error="cut")]
    assert summarize(records, 2.0, parse_goals(["ttft:500", "tpot:150"])).goodput == 0.5
    assert summarize(records, 2.0, parse_goals(["e2el:60000"])).goodput == 1.5
    assert summarize(records, 2.0, parse_goals(["itl:99"])).goodput == 0.0


def test_nothing_measured_is_no_spread():
    assert Spread.of([]) is None
    summary = summarize([record(error="x")], 1.0)
    assert summary.ttft is None


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2.5), (1.0, 4), (0.9, 3.7)])
def test_percentiles(share, value):
    assert percentile([1, 2, 3, 4], share) == pytest.approx(value)


def test_goals():
    assert parse_goals(["ttft:500 tpot:50.5", "e2el:9"]) == {"ttft": 500, "tpot": 50.5, "e2el": 9}
    for wrong in ("ttft", "ttft:fast", "speed:3"):
        with pytest.raises(ValueError, match="ttft:500"):
            parse_goals([wrong])


def test_prompts_repeat_with_their_seed_and_share_no_prefix():
    assert prompts(5, 20, seed=1) == prompts(5, 20, seed=1)
    assert prompts(5, 20, seed=1) != prompts(5, 20, seed=2)
    assert all(len(text.split()) == 20 for text in prompts(5, 20, seed=1))
    assert len({text.split()[0] for text in prompts(50, 3, seed=1)}) == 50


def test_arrivals():
    assert list(arrivals(3, float("inf"), seed=0)) == [0, 0, 0]
    times = list(arrivals(2000, 10.0, seed=0))
    assert times == list(arrivals(2000, 10.0, seed=0))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.1)
