"""Drafts are given where they pay, and nowhere else."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from starling_engine.config import SpeculativeConfig
from starling_engine.delta import Stats
from starling_engine.params import SamplingParams
from starling_engine.spec_decode.acceptance_log import AcceptanceLog
from starling_engine.spec_decode.proposers import repeated
from starling_engine.spec_decode.speculator import Speculator
from starling_engine.spec_decode.token_index import TokenIndex
from starling_engine.spec_decode.verify_cost import VerifyCost
from starling_engine.step import OWN, StepPlan, StepResult
from starling_engine.token_packing import unpack_tokens

from tests.engine.toy_engine import VOCAB, ToyConstraint, ToyEngine, token_after

LOOP = [1, 2, 3, 4, 5, 6]


def speculating(method: str | None = "ngram", *, own: bool = False, **settings: object) -> ToyEngine:
    """Returns an engine whose drafts are made from text; its steps take `seconds_of`. With `own`, two are in flight."""
    engine = ToyEngine(max_model_len=600, num_blocks=600, budget=256, **{"depth": 1 + own, **settings})
    config, scheduler = SpeculativeConfig(method=method, num_speculative_tokens=8), engine.scheduler
    scheduler.drafter = Speculator(config, scheduler.stats, own_drafts=own)
    engine.worker.guess = prompt_lookup
    return engine


def prompt_lookup(tokens: list[int], _: int, count: int) -> list[int]:
    index = TokenIndex(2)
    index.extend(tokens)
    matches = index.matches(tokens, 5)
    return repeated(tokens, matches[0].end, count) if matches else []


def cheap(plan: StepPlan) -> float:
    return 0.020 + 0.0005 * plan.total_tokens


def usual(plan: StepPlan) -> float:
    """Takes as long as a 0.6B model on two cores."""
    return 0.020 + 0.003 * plan.total_tokens


def dear(plan: StepPlan) -> float:
    return 0.001 + 0.020 * plan.total_tokens


def repeat(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the toy model repeat its prompt."""
    monkeypatch.setattr("tests.engine.toy_engine.token_after", lambda tokens, _: tokens[len(tokens) - len(LOOP)])
    engine.add("a", LOOP * 3, SamplingParams(max_tokens=300))
    engine.run()
    assert engine.outputs["a"] == LOOP * 50


def test_text_that_repeats_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating()
    engine.worker.seconds = cheap
    repeat(engine, monkeypatch)
    stats = engine.scheduler.stats
    assert len(engine.plans) < 300 / 6
    assert stats.spec_accepted_tokens_total > 0.95 * stats.spec_draft_tokens_total > 240
    assert stats.spec_accepted_per_position[0] == stats.spec_drafts_total, "all of the first drafts"
    assert sum(stats.spec_accepted_per_position) == stats.spec_accepted_tokens_total


@pytest.mark.parametrize("own", [False, True])
def test_there_are_no_drafts_where_each_takes_as_long_as_a_step(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(own=own)
    engine.worker.seconds = dear
    repeat(engine, monkeypatch)
    assert not any(sum(plan.num_drafts) for plan in engine.plans[60:])


@pytest.mark.parametrize("own", [False, True])
def test_drafts_that_are_refused_end_at_once(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tokens at random always have a guess, which is seldom right. Two seconds are some 80 of these steps."""
    text = random.Random(2).choices(range(12), k=564)
    monkeypatch.setattr("tests.engine.toy_engine.token_after", lambda tokens, _: text[len(tokens)])
    engine = speculating(own=own)
    engine.worker.seconds = usual
    engine.add("a", text[:264], SamplingParams(max_tokens=300))
    engine.run()
    assert engine.outputs["a"] == text[264:]
    drafted = [sum(plan.num_drafts) for plan in engine.plans]
    assert 4 < sum(drafted[:12]) < 16, "they are tried, for few steps"
    assert sum(drafted[12:]) < 4


def test_a_request_may_do_without_and_a_prediction_needs_no_method(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(max_num_seqs=4)
    monkeypatch.setattr("tests.engine.toy_engine.token_after", lambda tokens, _: tokens[len(tokens) - len(LOOP)])
    engine.add("off", LOOP * 3, SamplingParams(max_tokens=50, speculative=False))
    engine.run()
    assert not engine.scheduler.stats.spec_drafts_total
    engine = speculating(None)
    engine.worker.seconds = cheap
    engine.add("plain", LOOP * 3, SamplingParams(max_tokens=50))
    engine.run()
    assert not engine.scheduler.stats.spec_drafts_total
    engine.add("predicted", LOOP * 3, SamplingParams(max_tokens=48), prediction_ids=LOOP * 8)
    engine.run()
    assert engine.scheduler.stats.spec_accepted_tokens_total > 30


@pytest.mark.parametrize("own", [False, True])
def test_text_that_begins_to_repeat_is_drafted_on(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host compares its guesses also while there are no drafts: so it knows when they pay again."""
    monkeypatch.setattr(
        "tests.engine.toy_engine.token_after",
        lambda tokens, seed: token_after(tokens, seed) if len(tokens) < 200 else tokens[len(tokens) - 30],
    )
    engine = speculating(own=own)
    engine.worker.seconds = usual
    engine.add("a", random.Random(0).choices(range(4), k=60), SamplingParams(max_tokens=400))
    while len(engine.outputs.get("a", ())) < 140:
        engine.step()
    engine.plans.clear()
    engine.run()
    assert len(engine.plans) < 0.6 * 260


def test_steps_stay_in_flight_where_the_device_makes_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(own=True)
    engine.worker.seconds = cheap
    left: list[int] = []
    monkeypatch.setattr(engine.worker, "execute", note_before(engine.worker.execute, left, engine))
    repeat(engine, monkeypatch)
    stats, drafts = engine.scheduler.stats, [unpack_tokens(plan.drafts) for plan in engine.plans if plan.drafts]
    assert len(engine.plans) < 300 / 6 and all(set(some) == {OWN} for some in drafts)
    assert left.count(2) > 0.9 * len(left), "one runs, and one waits for it"
    assert stats.spec_accepted_tokens_total > 0.9 * stats.spec_draft_tokens_total > 200


def note_before(execute: Callable[..., StepResult], left: list[int], engine: ToyEngine) -> Callable[..., StepResult]:
    """Notes how many steps are in flight when one is executed."""

    def call(*arguments: Any) -> StepResult:
        left.append(engine.scheduler.num_in_flight)
        return execute(*arguments)

    return call


def test_drafts_that_the_device_did_not_find_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(own=True)
    engine.worker.seconds, engine.worker.guess = cheap, lambda *_: []
    repeat(engine, monkeypatch)
    assert sum(sum(plan.num_drafts) for plan in engine.plans) > 100
    assert engine.scheduler.stats.spec_drafts_total == engine.scheduler.stats.spec_draft_tokens_total == 0


def test_how_often_the_device_is_right_is_what_its_drafts_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own guesses are right here; where there were drafts, these count."""
    engine = speculating(own=True)
    engine.worker.seconds, engine.worker.guess = usual, lambda *arguments: [49] * arguments[-1]
    repeat(engine, monkeypatch)
    drafted = [sum(plan.num_drafts) for plan in engine.plans]
    assert sum(drafted[40:]) <= len(drafted[40:]), "one now and then"


def test_the_device_drafts_for_no_request_with_a_mask_or_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.toy_engine.token_after", lambda tokens, _: tokens[len(tokens) - len(LOOP)])
    engine = speculating(own=True)
    engine.worker.seconds = cheap
    engine.add("predicted", LOOP * 3, SamplingParams(max_tokens=60), prediction_ids=LOOP * 8)
    constraint = ToyConstraint(1, 60)
    monkeypatch.setattr(constraint, "mask", lambda _: (1 << VOCAB) - 1)
    engine.add("masked", LOOP * 3, SamplingParams(max_tokens=60), constraint)
    engine.run()
    drafts = [token for plan in engine.plans for token in unpack_tokens(plan.drafts)]
    assert drafts and OWN not in drafts


def test_with_steps_in_flight_drafts_wait_for_the_tokens_that_they_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(depth=2)
    engine.worker.seconds = cheap
    repeat(engine, monkeypatch)
    assert len(engine.plans) < 300 / 6


def test_acceptance_is_logged_while_there_are_drafts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "starling.speculation")
    now, stats = 0.0, Stats()
    log = AcceptanceLog(stats, lambda: now)
    for _ in range(30):
        now += 1.0
        stats.spec_drafts_total += 2
        stats.spec_draft_tokens_total += 8
        stats.spec_accepted_tokens_total += 6
        log.update()
    line = "60 of 80 draft tokens accepted (75 %) in 10 s; rows with drafts gave 4.00 tokens on average"
    assert caplog.messages == [line] * 3


def test_the_time_of_steps_is_a_line_through_what_was_measured() -> None:
    rng, cost = random.Random(0), VerifyCost()
    for _ in range(200):
        tokens = rng.randint(1, 8)
        cost.observe(tokens, (20 + 3 * tokens) * rng.uniform(0.95, 1.05) * rng.choice([1] * 20 + [50]) / 1000)
    assert cost.price(1, 1) == pytest.approx(3 / 23, rel=0.35)
    for tokens in (1, 4, 8):
        assert cost.of(tokens) == pytest.approx((20 + 3 * tokens) / 1000, rel=0.25)


def test_a_step_that_was_held_up_is_forgotten() -> None:
    cost = VerifyCost()
    for tokens in (1, 1, 1, 5):
        cost.observe(tokens, 1.0 if tokens == 5 else 0.02)
    assert cost.price(1, 1) > 0.15, "the first look is what there is"
    for _ in range(200):
        cost.observe(1, 0.02)
    assert cost.price(1, 1) == pytest.approx(0.15 / 1.15, rel=0.05), "and drafts are tried again"


def test_a_step_that_is_always_the_same_says_nothing_of_one_token_more() -> None:
    cost = VerifyCost()
    before = cost.price(1, 1)
    for _ in range(100):
        cost.observe(1, 0.02)
    assert cost.price(1, 1) == pytest.approx(before)
