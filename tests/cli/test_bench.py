"""Numbers that benchmarks compute from their times."""

import itertools

import pytest
from starling_cli.benchmark.acceptance import DraftCounts, accepted_between, counts_in
from starling_cli.benchmark.records import Record, Spread, parse_goals, percentile, summarize
from starling_cli.benchmark.workload import arrivals, prompts

from tests.cli.chatting.recorded_server import recorded_server
from tests.cli.commands.running import starling


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


def test_acceptance_is_that_between_two_readings():
    before, after = DraftCounts(10, 30, 20, (10, 8, 2)), DraftCounts(14, 40, 26, (13, 10, 3, 0))
    found = accepted_between(before, after)
    assert (found.rows, found.draft_tokens, found.accepted_tokens) == (4, 10, 6)
    assert (found.rate, found.length, found.rate_by_position) == (0.6, 2.5, [0.75, 0.5, 0.25, 0.0])
    assert accepted_between(after, after) is None, "no drafts"
    assert accepted_between(after, before) is None, "the server began anew"


VLLM_METRICS = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a, {b}"} 7.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a, {b}"} 1.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a, {b}"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a, {b}"} 21.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a, {b}"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a, {b}",position="10"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a, {b}",position="9"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a, {b}",position="9"} 2.0
vllm:generation_tokens_total{engine="0",model_name="a, {b}"} 99.0
"""


def test_counters_of_drafts_are_summed_over_engines():
    assert counts_in(VLLM_METRICS) == DraftCounts(8, 21, 9, (5, 1))
    assert counts_in("") == counts_in("no metrics\n") == DraftCounts()


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


def test_a_server_that_is_not_there():
    answer = starling("bench", "serve", "--url", "http://127.0.0.1:9")
    assert answer.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in answer.stderr


def test_a_server_whose_list_names_no_model():
    with recorded_server([], models=()) as (url, asked):
        answer = starling("bench", "serve", "--url", url)
    assert (answer.returncode, asked) == (1, [])
    assert "has no list of models" in answer.stderr and "--model NAME" in answer.stderr
