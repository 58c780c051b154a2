"""Prompts in a step: within its target of time, and not all of one while others wait."""

from pathlib import Path

import pytest
from starling_engine.args import EngineArgs
from starling_engine.errors import ConfigError
from starling_engine.params import SamplingParams
from starling_engine.scheduler.prefill import PrefillBudget, shares
from starling_engine.step import StepPlan

from tests.engine.core.test_scheduler import params, prompt_of
from tests.engine.cores import core_for
from tests.engine.real_engine import MODEL
from tests.engine.toy_engine import ToyEngine

BLOCK = 8


@pytest.mark.parametrize(
    ("measured", "tokens"),
    [
        ([], 2048),
        ([([1] * 16, 0.05)], 2048),  # nothing is known of prompts
        ([([2048], 2.0)], 204),
        ([([2048], 2.0), ([1] * 16, 0.05)], 153),
        ([([16], 0.05), ([16, 2032], 2.0)], 204),  # few tokens say little
        ([([2048], 2.0), ([1] * 16, 0.3)], 16),  # the decodes alone take longer
        ([([2048], 2.0), ([1] * 16, 0.19)], 16),
        ([([2048], 0.01)], 2048),
        ([([2048], 2.0), ([1, 5], 0.15)], 204),  # the end of a prompt says nothing
        ([([2048], 2.0), ([1] * 64, 0.3), ([1, 16], 0.05)], 152),  # what decoded so slowly has ended
    ],
)
def test_prompts_get_what_fits(measured: list[tuple[list[int], float]], tokens: int) -> None:
    budget = PrefillBudget(0.2, 16)
    for rows, seconds in measured:
        budget.observe(rows, seconds)
    assert budget.tokens(2048) == pytest.approx(tokens, rel=0.02)
    assert budget.tokens(10) == 10


@pytest.mark.parametrize("decodes", [0.001, 0.05, 0.15])
@pytest.mark.parametrize("believed", [0.0, 0.05, 0.4])
def test_the_time_of_a_step_comes_to_its_target(decodes: float, believed: float) -> None:
    """Also where no step of decodes alone shows that they take longer, or less, than those before."""
    budget = PrefillBudget(0.2, 16)
    budget.observe([2048], 2.0)
    if believed:
        budget.observe([1] * 16, believed)
    seconds = 0.0
    for _ in range(40):
        tokens = budget.tokens(2048)
        seconds = decodes + tokens * 0.001
        budget.observe([*[1] * 16, tokens], seconds)
    assert seconds == pytest.approx(0.2, rel=0.05)


def test_without_a_target_prompts_get_all() -> None:
    budget = PrefillBudget(0.0, 16)
    budget.observe([2048], 2.0)
    assert budget.tokens(2048) == 2048


@pytest.mark.parametrize(
    ("tokens", "wanted", "given"),
    [
        (64, [], []),
        (64, [1000], [64]),
        (64, [1000, 20], [44, 20]),
        (64, [1000, 1000], [64, 0]),
        (64, [20, 1000], [20, 44]),
        (64, [1000, 900, 2000, 20], [32, 12, 0, 20]),
        (64, [1000, 20, 20, 20], [32, 20, 12, 0]),
        (64, [10, 10], [10, 10]),
        (64, [1000, 4, 1000], [60, 4, 0]),
        (64, [40, 1000, 4], [40, 20, 4]),
        (15, [1000, 10], [15, 0]),
        (0, [5, 5], [0, 0]),
    ],
)
def test_a_prompt_leaves_a_half_to_shorter_ones(tokens: int, wanted: list[int], given: list[int]) -> None:
    assert shares(tokens, wanted, BLOCK) == given


def seconds_of(plan: StepPlan) -> float:
    return 0.045 + 0.001 * plan.total_tokens


def long_engine(budget: int = 512, **settings: int) -> ToyEngine:
    engine = ToyEngine(num_blocks=256, max_model_len=1200, budget=budget, prefix_caching=False, **settings)
    engine.worker.seconds = seconds_of
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_streams_do_not_wait_for_a_long_prompt(depth: int) -> None:
    engine = long_engine(step_target_ms=200, depth=depth)
    for i in range(4):
        engine.add(str(i), prompt_of(20, i), params(100))
    for _ in range(5):
        engine.step()
    engine.add("long", prompt_of(600, 9), params(1))
    before = len(engine.plans)
    while "long" not in engine.finished:
        engine.step()
    slow = [plan for plan in engine.plans[before:] if seconds_of(plan) > 1.1 * 0.2]
    assert not slow, [plan.num_tokens for plan in slow]
    assert len(engine.plans) - before < 8, "and uses the time that a step has"


def test_a_block_of_a_prompt_goes_in_however_long_decodes_take() -> None:
    engine = long_engine(step_target_ms=20)
    engine.add("stream", prompt_of(20), params(40))
    for _ in range(5):
        engine.step()
    engine.add("long", prompt_of(10 * BLOCK, 9), params(1))
    for _ in range(10):
        plan = engine.step()
        assert plan is not None and sorted(plan.num_tokens) == [1, BLOCK]
    assert "long" in engine.finished


def test_stats_say_how_many_prompt_tokens_a_step_has_room_for() -> None:
    engine = long_engine(step_target_ms=20)
    assert engine.scheduler.snapshot().step_tokens == 512, "all, until a prompt was measured"
    engine.add("long", prompt_of(600), params(1))
    engine.step()
    assert engine.scheduler.snapshot().step_tokens < 100


def test_a_prompt_without_streams_takes_the_whole_step() -> None:
    engine = long_engine(step_target_ms=20)
    engine.add("long", prompt_of(1100), params(1))
    for _ in range(2):
        plan = engine.step()
        assert plan is not None and plan.num_tokens == [512]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = long_engine(budget=64)
    engine.add("long", prompt_of(1100), params(1))
    engine.step()
    engine.add("short", prompt_of(20, 1), params(1))
    plan = engine.step()
    assert plan is not None and plan.num_tokens == [20, 44]
    assert "short" in engine.finished


def test_budget_that_waiting_requests_cannot_use_is_not_lost() -> None:
    """The second one waits for blocks, and the first goes on as if it were alone."""
    engine = ToyEngine(num_blocks=30, budget=64, max_model_len=232, prefix_caching=False)
    engine.add("first", prompt_of(200), SamplingParams(max_tokens=1))
    engine.add("second", prompt_of(200, 1), SamplingParams(max_tokens=1))
    for count in (64, 64, 64):
        plan = engine.step()
        assert plan is not None and plan.num_tokens == [count]
    engine.run()
    assert set(engine.finished) == {"first", "second"}


@pytest.mark.parametrize(("asked", "target"), [({}, 200), ({"step_target_ms": 70}, 70), ({"step_target_ms": 0}, 0)])
def test_the_platform_gives_the_target_that_nobody_gave(asked: dict[str, int], target: int) -> None:
    with core_for(Path(MODEL), **asked) as core:
        assert core.scheduler.config.step_target_ms == target


def test_a_target_is_no_less_than_none() -> None:
    with pytest.raises(ConfigError, match="step_target_ms"):
        EngineArgs(model="m", step_target_ms=-1)


def test_streams_wait_no_longer_for_a_suspect_s_prompt() -> None:
    engine = long_engine(step_target_ms=200)
    engine.worker.fail_from = {49: 500}
    for i in range(4):
        engine.add(str(i), prompt_of(20, i), params(60))
    for _ in range(5):
        engine.step()
    engine.add("bad", [49, *prompt_of(600, 9)], params(1))
    before = len(engine.plans)
    engine.run()
    assert engine.finished["bad"].error == "boom"
    beside_streams = [plan for plan in engine.plans[before:] if seconds_of(plan) > 1.1 * 0.2]
    assert not beside_streams, [plan.num_tokens for plan in beside_streams]


def test_a_request_preempted_in_a_step_gets_no_share_of_it() -> None:
    engine = ToyEngine(num_blocks=97, budget=32, max_model_len=800, prefix_caching=False)
    engine.add("stream", prompt_of(15), params(60))
    engine.step()
    engine.add("long", prompt_of(700, 1), params(1))
    engine.add("newest", prompt_of(12, 2), params(60))
    plan = next(plan for plan in iter(engine.step, None) if engine.scheduler.stats.preemptions_total)
    assert plan.num_tokens == [1, 31]
