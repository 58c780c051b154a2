"""The scheduler over a toy worker that checks every page it reads.

The file is long because scenarios of one toy engine stand beside the random traffic that mixes them.
"""

import logging
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starling_engine.config import SchedulingPolicy
from starling_engine.params import RepetitionDetectionParams, SamplingParams
from starling_engine.request_state import Gate
from starling_engine.scheduler.preemption_log import BURST_SECONDS, PreemptionLog
from starling_engine.scheduler.queue import make_queue
from starling_engine.step import FOLLOWS, StepResult
from starling_engine.token_packing import pack_floats

from tests.engine.toy_engine import NO_GRAMMAR, ToyConstraint, ToyEngine, expected_output, prefix_hashes, state_of

BAD, BROKEN = 60, 61
"""First tokens of prompts with which steps, or their own rows, fail."""
ERRORS = ("boom", "not finite", "it is told to fail", "no such grammar")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def params(max_tokens: int = 8, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **fields)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [0, 12])
def test_one_request(depth: int, window: int) -> None:
    engine = ToyEngine(depth=depth, window=window, budget=16)
    engine.add("a", prompt_of(50), params(30), seed=3)
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt_of(50), params(30), 3, 128)
    assert engine.finished["a"].finish_reason == "length"


def test_a_long_prompt_is_chunked_while_others_decode() -> None:
    engine = ToyEngine(budget=16, prefix_caching=False)
    engine.add("short", prompt_of(4), params(20))
    engine.step()
    engine.add("long", prompt_of(60, 1), params(2))
    plan = engine.step()
    assert plan is not None and sorted(plan.num_tokens) == [1, 15], "the decode runs first, the prompt takes the rest"
    engine.run()
    assert engine.outputs["long"] == expected_output(prompt_of(60, 1), params(2), 0, 128)


def test_a_prompt_that_leads_goes_before_those_that_came_first_in_most_steps() -> None:
    engine = ToyEngine(depth=1, budget=8, prefix_caching=False)
    engine.add("running", prompt_of(40, 1), params(2))
    engine.step()
    engine.add("waiting", prompt_of(40, 2), params(2))
    engine.add("lone", prompt_of(60, 3), params(2), priority=-1)
    requests = engine.scheduler.requests
    shares = []
    for _ in range(9):
        plan = engine.step()
        assert plan is not None
        tokens = dict(zip(plan.slots, plan.num_tokens, strict=True))
        shares.append([tokens.get(requests[name].slot, 0) for name in ("running", "lone")])
    assert shares[:7] == [[0, 8]] * 7, "what is computed as it comes waits, too"
    assert shares[7] == [8, 0], "once, so that all go on"
    assert shares[8] == [4, 4], "the end of the prompt that leads, and what goes on"
    engine.run()
    for name, length, seed in (("running", 40, 1), ("waiting", 40, 2), ("lone", 60, 3)):
        assert engine.outputs[name] == expected_output(prompt_of(length, seed), params(2), 0, 128)


def test_each_pipeline_stage_has_a_step_of_decodes_and_one_is_to_spare() -> None:
    engine = ToyEngine(stages=2, depth=3)
    for number in range(6):
        engine.add(str(number), prompt_of(4, number), params(30))
    for _ in range(6):
        engine.step()
    assert {len(plan.slots) for plan in engine.plans[-3:]} == {2} and engine.scheduler.num_in_flight == 2
    assert len({slot for plan in engine.plans[-3:] for slot in plan.slots}) == 6
    engine.run()
    for number in range(6):
        assert engine.outputs[str(number)] == expected_output(prompt_of(4, number), params(30), 0, 128)


def test_stop_token_ends_and_is_reported() -> None:
    output = expected_output(prompt_of(10), params(30), 0, 128)
    stopping = params(30, stop_token_ids=[output[5]])
    for depth in (1, 2):
        engine = ToyEngine(depth=depth)
        engine.add("a", prompt_of(10), stopping)
        engine.run()
        assert engine.outputs["a"] == expected_output(prompt_of(10), stopping, 0, 128)
        assert (engine.finished["a"].finish_reason, engine.finished["a"].stop_token) == ("stop", output[5])


def test_a_constraint_that_allows_no_more_ends_with_text_and_not_with_a_token_that_stops() -> None:
    constraint = ToyConstraint(3, most=6)
    output = expected_output(prompt_of(10), params(30), 0, 128, constraint)
    assert len(output) == 6
    for stops, last_is_text in (([], True), ([output[-1]], False)):
        engine = ToyEngine()
        engine.add("a", prompt_of(10), params(30, stop_token_ids=stops, min_tokens=20), ToyConstraint(3, most=6))
        engine.run()
        assert engine.outputs["a"] == output
        assert (engine.finished["a"].finish_reason, engine.finished["a"].last_is_text) == ("stop", last_is_text)


@pytest.mark.parametrize("token_fails", [False, True])
def test_a_constraint_that_fails_ends_its_request_alone(token_fails: bool) -> None:
    engine = ToyEngine()
    for name, fails_at in (("a", 3), ("b", None)):
        engine.add(name, prompt_of(10), params(6), ToyConstraint(3, 9, fails_at, token_fails=token_fails))
    engine.run()
    assert (engine.finished["a"].finish_reason, engine.finished["a"].error) == ("error", "it is told to fail")
    assert len(engine.outputs["a"]) == 3 and engine.finished["b"].finish_reason == "length"


def test_a_second_request_hits_the_prefix() -> None:
    engine = ToyEngine()
    engine.add("a", prompt_of(40), params(4))
    engine.run()
    engine.add("b", prompt_of(40), params(4))
    engine.run()
    assert engine.cached == {"a": 0, "b": 32}, "all full blocks before the last token"
    assert engine.outputs["a"] == engine.outputs["b"]
    engine.add("salted", prompt_of(40), params(4), cache_salt="x")
    engine.run()
    assert engine.cached["salted"] == 0


def test_prefix_hits_of_window_groups_need_the_window_only() -> None:
    engine = ToyEngine(window=10, num_blocks=40)
    engine.add("a", prompt_of(64), params(2))
    engine.run()
    engine.add("b", prompt_of(64)[:48] + prompt_of(20, 5), params(2))
    engine.run()
    assert engine.cached["b"] == 48
    assert engine.outputs["b"] == expected_output(prompt_of(64)[:48] + prompt_of(20, 5), params(2), 0, 128)


def test_window_blocks_are_freed_while_running() -> None:
    engine = ToyEngine(window=8, budget=8, prefix_caching=False)
    engine.add("a", prompt_of(80), params(1))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, engine.kv.pool.num_used)
    assert most <= 10 + 3, "ten blocks of the full group, and only those of the window"


def test_prefix_hits_of_chunks_need_the_last_one_only() -> None:
    """Others have taken all blocks of the earlier ones."""
    engine = ToyEngine(chunk=32, num_blocks=40)
    engine.add("a", prompt_of(64), params(2))
    engine.run()
    for name, length in (("b", 56), ("c", 64)):
        engine.add(name, prompt_of(64)[:length] + prompt_of(20, 5), params(2))
        engine.run()
        assert engine.cached[name] == length
        assert engine.outputs[name] == expected_output(prompt_of(64)[:length] + prompt_of(20, 5), params(2), 0, 128)


def test_blocks_of_earlier_chunks_are_freed_while_running() -> None:
    engine = ToyEngine(chunk=16, budget=8, prefix_caching=False)
    engine.add("a", prompt_of(80), params(20))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, engine.kv.pool.num_used)
    assert engine.outputs["a"] == expected_output(prompt_of(80), params(20), 0, 128)
    assert most <= 13 + 4, "thirteen blocks of the full group, and those of one chunk and of a step"


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_recomputes_and_changes_nothing(depth: int) -> None:
    engine = ToyEngine(num_blocks=13, depth=depth, prefix_caching=False)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(16, i), params(40), seed=i)
    engine.run()
    assert engine.scheduler.stats.preemptions_total > 0
    for i in range(4):
        assert engine.outputs[f"r{i}"] == expected_output(prompt_of(16, i), params(40), i, 128)


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_each_preemption_is_logged_and_the_first_of_a_burst_at_info(preempt: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "starling.scheduler")
    now = 100.0
    engine = ToyEngine(block_size=8, num_blocks=50, max_model_len=300, slots=40, budget=128, preempt=preempt)
    engine.scheduler._preemptions = PreemptionLog(lambda: now)
    levels = []
    for burst in range(2):
        caplog.clear()
        before = engine.scheduler.stats.preemptions_total
        for i in range(4):
            engine.add(f"{burst}-{i}", prompt_of(80, 4 * burst + i), params(120), arrival=i)
        engine.run()
        records = [record for record in caplog.records if " is preempted at " in record.message]
        assert len(records) == engine.scheduler.stats.preemptions_total - before > 1, "each once"
        line = rf"\d-\d is preempted at \d+ of \d+ tokens \({preempt}\): \d-\d wants \d+ blocks, \d+ free"
        assert all(re.fullmatch(line, record.message) for record in records)
        levels.append([record.levelno for record in records])
        now += BURST_SECONDS
    assert all(first == logging.INFO and {*others} == {logging.DEBUG} for first, *others in levels)


def test_priority_runs_first_and_preempts_last() -> None:
    engine = ToyEngine(num_blocks=9, max_num_seqs=2, policy="priority", prefix_caching=False)
    engine.add("low", prompt_of(16, 0), params(30), priority=5, arrival=0.0)
    engine.add("high", prompt_of(16, 1), params(30), priority=0, arrival=1.0)
    engine.add("mid", prompt_of(16, 2), params(2), priority=2, arrival=2.0)
    engine.run()
    assert list(engine.finished)[-1] == "low"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 30])
def test_forks_share_the_prompt_and_copy_on_write(depth: int, prompt_length: int) -> None:
    engine = ToyEngine(depth=depth, prefix_caching=False)
    for i in range(3):
        engine.add(f"a/{i}", prompt_of(prompt_length), params(12), seed=i, fork_of="a/0" if i else None)
    engine.run()
    for i in range(3):
        assert engine.outputs[f"a/{i}"] == expected_output(prompt_of(prompt_length), params(12), i, 128)
    copies = sum(len(plan.copies) for plan in engine.plans)
    assert copies == (2 if (prompt_length - 1) % 8 else 0)
    assert sum(plan.total_tokens for plan in engine.plans) < 3 * prompt_length + 36 + 3 * depth or prompt_length < 8


def test_a_fork_whose_parent_is_aborted_runs_alone() -> None:
    engine = ToyEngine(budget=8)
    engine.add("a/0", prompt_of(40), params(4))
    engine.add("a/1", prompt_of(40), params(4), seed=1, fork_of="a/0")
    engine.step()
    engine.scheduler.abort("a/0")
    engine.run()
    assert engine.outputs["a/1"] == expected_output(prompt_of(40), params(4), 1, 128)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_frees_at_once_and_discards_results_in_flight(depth: int) -> None:
    engine = ToyEngine(depth=depth)
    engine.add("a", prompt_of(30), params(50))
    engine.step()
    engine.step()
    engine.scheduler.abort("a")
    assert engine.kv.pool.num_used == 0
    engine.add("b", prompt_of(30, 2), params(5))
    engine.run()
    assert "a" not in engine.finished
    assert engine.outputs["b"] == expected_output(prompt_of(30, 2), params(5), 0, 128)


def test_asynchronous_steps_take_tokens_that_are_still_in_flight() -> None:
    engine = ToyEngine(depth=2)
    engine.add("a", prompt_of(10), params(6))
    first = engine.scheduler.schedule()
    assert first is not None and first.starts == [0]
    engine.results.append(engine.worker.execute(first))
    second = engine.scheduler.schedule()
    assert second is not None and second.starts == [FOLLOWS]
    engine.results.append(engine.worker.execute(second))
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt_of(10), params(6), 0, 128)


def test_pooling_ends_after_its_prompt() -> None:
    engine = ToyEngine(budget=16, max_model_len=48)
    engine.embed("a", prompt_of(48))
    engine.run()
    assert engine.finished["a"].pooled is not None and engine.finished["a"].finish_reason == "stop"


def test_impossible_requests_are_refused_at_once() -> None:
    engine = ToyEngine(num_blocks=9)
    too_long = engine.add("a", prompt_of(80), params(1))
    assert too_long is not None and "80" in (too_long.error or "") and "64" in (too_long.error or "")
    assert engine.add("b", [], params(1)) is not None
    assert engine.add("c", prompt_of(4), params(1)) is None
    assert engine.add("c", prompt_of(4), params(1)) is not None, "the id is taken"


def test_a_full_queue_refuses() -> None:
    engine = ToyEngine(max_num_seqs=8, max_num_waiting=4)
    refusals = [engine.add(str(i), prompt_of(4), params(1)) for i in range(24)]
    assert [refusal is None for refusal in refusals] == [True] * 12 + [False] * 12, "8 seats are free, and 4 may wait"
    assert all(refusal.refused for refusal in refusals if refusal is not None)
    assert engine.add("moved", prompt_of(4), params(1), attempt=1) is None, "another core had accepted it"
    engine.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_queue_is_full_of_tokens_too(policy: SchedulingPolicy) -> None:
    engine = ToyEngine()
    engine.scheduler.config = replace(engine.scheduler.config, max_num_waiting_tokens=30)
    engine.scheduler.waiting = make_queue(policy)
    assert engine.add("alone", prompt_of(40), params(1)) is None, "one that is alone may be of any length"
    refused = engine.add("more", prompt_of(4), params(1))
    assert refused is not None and refused.refused and "40 tokens" in (refused.error or "")
    assert engine.add("moved", prompt_of(4), params(1), attempt=1) is None, "another core had accepted it"
    engine.run()
    assert engine.scheduler.waiting.num_tokens == 0
    assert [engine.add(str(i), prompt_of(10), params(1)) is None for i in range(4)] == [True, True, True, False]
    engine.run()


def test_a_token_that_waits_takes_four_bytes() -> None:
    engine = ToyEngine()
    ids = list(range(1000, 1060))
    engine.add("a", ids, params(1))
    waiting = next(iter(engine.scheduler.waiting))
    assert len(memoryview(waiting.tokens)) * waiting.tokens.itemsize == 4 * len(ids)
    assert not waiting.record.prompt_ids, "nor are they held twice"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_traffic(seed: int, data: st.DataObject) -> None:
    """Every request gets what it would get alone, for any pool, groups, depth, stages, budget, target, drafts and traffic."""
    draw = data.draw
    rng = random.Random(seed)
    block_size = draw(st.sampled_from([8, 16]))
    window, chunk = draw(st.sampled_from([(0, 0), (5, 0), (8, 0), (24, 0), (0, 16), (0, 48)]))
    state = draw(st.sampled_from([None, state_of(1), state_of(4)]))
    engine = ToyEngine(
        state=state,
        groups=[] if state is not None and draw(st.booleans()) else None,
        num_blocks=draw(st.integers(24, 60)),
        block_size=block_size,
        window=window,
        chunk=chunk,
        depth=draw(st.integers(1, 3)),
        stages=draw(st.sampled_from([1, 1, 2])),
        drafts=draw(st.sampled_from([0, 1, 4])),
        rng=random.Random(seed + 1),
        max_num_seqs=draw(st.integers(1, 6)),
        budget=draw(st.integers(6, 40)),
        step_target_ms=draw(st.sampled_from([0, 20])),
        max_model_len=72,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        prefix_caching=draw(st.booleans()),
    )
    engine.worker.seconds = lambda plan: 0.01 * rng.random() + 0.001 * plan.total_tokens
    shared = prompt_of(60, seed)
    masked = draw(st.booleans())
    engine.worker.fail_from = {BAD: rng.randint(1, 40)}
    engine.worker.broken = {BROKEN}
    wanted: dict[str, list[int]] = {}
    movable: dict[str, tuple[list[int], SamplingParams, ToyConstraint | None, dict[str, Any]]] = {}
    pooled: dict[str, list[int]] = {}
    aborted: set[str] = set()
    faulty: set[str] = set()
    for step in range(40):
        if step < 25 and rng.random() < 0.5:
            prompt = shared[: rng.randint(1, 60)] + rng.choices(range(50), k=rng.randint(0, 8))
            prompt[:1] = rng.choices([prompt[0], BAD, BROKEN], [8, 1, 1])
            detection = rng.choice([None, RepetitionDetectionParams(rng.randint(1, 4), 1, 2)])
            copies = rng.choice([1, 1, 1, 3])
            scored = rng.choice([None, 0]) if copies == 1 else None
            stops = [rng.randrange(50)]
            own = params(rng.randint(1, 20), stop_token_ids=stops, repetition_detection=detection, prompt_logprobs=scored)
            for i in range(copies):
                name = f"{step}/{i}"
                fork = f"{step}/0" if i else None
                fails_at = rng.choice([None, None, 3])
                free = rng.choice([0, 3]) if fails_at is None else 0
                token_fails = rng.random() < 0.5
                toy = ToyConstraint(i, rng.randint(1, 15), fails_at, free, token_fails=token_fails)
                constraint = toy if masked and rng.random() < 0.5 else None
                settings = {"fork_of": fork, "priority": rng.randint(0, 2), "arrival": float(step)}
                if engine.add(name, prompt, own, constraint, seed=i, **settings) is None:
                    none = constraint is not None and constraint.most == NO_GRAMMAR
                    wanted[name] = [] if none else expected_output(prompt, own, i, 72, constraint)
                    fails = constraint is not None and (fails_at is not None or none)
                    faulty |= {name} if prompt[0] in (BAD, BROKEN) or fails else set()
                    if copies == 1:
                        movable[name] = (prompt, own, constraint, settings)
            if rng.random() < 0.2 and prompt[0] not in (BAD, BROKEN):
                engine.embed(f"{step}/pooled", prompt, rng.choice(["last", "mean"]))
                pooled[f"{step}/pooled"] = prompt
        if wanted and rng.random() < 0.1:
            victim = rng.choice(sorted(wanted))
            engine.scheduler.abort(victim)
            aborted.add(victim)
        if rng.random() < 0.2 and (open_ := sorted(movable.keys() & engine.scheduler.requests)):
            move(engine, rng.choice(open_), movable)
        engine.step()
        engine.scheduler.check_integrity()
    engine.run()
    for name, output in wanted.items():
        done = engine.finished.get(name)
        assert name in aborted or engine.outputs[name] == output or (done and done.error in ERRORS), name
        assert name in aborted or done is None or done.error is None or name in faulty, f"{name} is no culprit"
        if name in movable and done is not None and done.error is None and movable[name][1].prompt_logprobs is not None:
            assert [row.token_ids[0] for row in engine.prompt_rows[name]] == movable[name][0][1:], name
    for name, prompt in pooled.items():
        assert engine.finished[name].pooled == pack_floats([float(prefix_hashes(prompt)[-1])])


def move(engine: ToyEngine, name: str, movable: dict[str, Any]) -> None:
    """Gives a request back to the core as its frontend does after an answer that it moved: with the output so far."""
    prompt, own, constraint, settings = movable[name]
    request = engine.scheduler.requests[name]
    told, attempt, seed = engine.outputs.get(name, []), request.record.attempt + 1, request.record.seed
    engine.scheduler.abort(name)
    again = None if constraint is None else replace_toy(constraint, told)
    sent = {"output_ids": [*told], "num_prompt_logprobs_sent": len(engine.prompt_rows.get(name, ()))}
    assert engine.add(name, prompt, own, again, seed=seed, attempt=attempt, **sent, **settings) is None


def replace_toy(toy: ToyConstraint, output: list[int]) -> ToyConstraint:
    fresh = ToyConstraint(toy.key, toy.most, toy.fails_at, toy.free, token_fails=toy.token_fails)
    fresh.output += output
    return fresh


def test_a_core_may_sleep_only_while_each_request_waits_for_an_event() -> None:
    engine = ToyEngine()
    engine.add("a", prompt_of(10), params(2))
    assert not engine.scheduler.waits_for_events
    gates = engine.scheduler.requests["a"].gates
    for gate in Gate:
        gates.add(gate)
        assert engine.scheduler.waits_for_events == (gate not in (Gate.HASHING, Gate.SUSPECT)), gate
        gates.add(Gate.HASHING)
        assert not engine.scheduler.waits_for_events, gate
        gates.clear()
    engine.run()
    assert engine.scheduler.waits_for_events, "there is none"


def test_prompt_scores_come_once_whatever_is_preempted() -> None:
    """A request that is computed again gives its prompt's log probabilities again; only new ones go out."""
    engine = ToyEngine(num_blocks=13, budget=10, prefix_caching=False)
    for i in range(4):
        engine.add(str(i), prompt_of(20, i), params(30, prompt_logprobs=1), seed=i)
    engine.run()
    assert engine.scheduler.stats.preemptions_total > 0
    assert {name: len(rows) for name, rows in engine.prompt_rows.items()} == {str(i): 19 for i in range(4)}


def test_a_newer_attempt_replaces_an_older_one() -> None:
    engine = ToyEngine()
    engine.add("a", prompt_of(10), params(20))
    engine.step()
    output = expected_output(prompt_of(10), params(20), 0, 128)
    assert engine.add("a", prompt_of(10), params(20), attempt=1, output_ids=output[:5]) is None
    engine.outputs["a"] = output[:5]
    engine.run()
    assert engine.outputs["a"] == output and engine.finished["a"].attempt == 1


def test_a_record_with_all_its_output_is_answered_at_once() -> None:
    engine = ToyEngine()
    answer = engine.add("a", prompt_of(10), params(2), output_ids=[3, 4])
    assert answer is not None and (answer.finish_reason, answer.error) == ("length", None)


def test_a_stale_result_changes_nothing() -> None:
    engine = ToyEngine()
    engine.add("a", prompt_of(10), params(4))
    plan = engine.scheduler.schedule()
    assert plan is not None
    result = engine.worker.execute(plan)
    assert engine.scheduler.update(StepResult(99, 0)) == []
    engine.results.append(result)
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt_of(10), params(4), 0, 128)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "window", "budget", "depth", "prefix_caching"),
    [
        (22, 8, 16, 32, 2, False),
        (9, 32, 40, 20, 1, True),  # a block leaves the window in the middle of another
        (16, 32, 100, 24, 2, True),
    ],
)
def test_windows_hold_tokens_in_flight(
    num_blocks: int, block_size: int, window: int, budget: int, depth: int, prefix_caching: bool
) -> None:
    """A pool of just the size that the peak asks for never starves a request."""
    shape = {"num_blocks": num_blocks, "block_size": block_size, "window": window, "max_model_len": 400}
    engine = ToyEngine(**shape, budget=budget, depth=depth, prefix_caching=prefix_caching)
    length = engine.kv.max_tokens - 8
    engine.add("a", prompt_of(length), params(8))
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt_of(length), params(8), 0, 400)
    assert engine.scheduler.stats.preemptions_total == 0


def test_the_first_delta_says_how_long_the_request_waited_for_its_first_step() -> None:
    engine = ToyEngine(max_num_seqs=1)
    for name in "ab":
        engine.add(name, prompt_of(4), params(3))
    engine.step()
    waiting = engine.scheduler.requests["b"]
    assert waiting.arrived is not None
    waiting.arrived -= 100.0
    engine.run()
    assert 0 < engine.waited["a", 0] < 50 and 100 < engine.waited["b", 0] < 150
