"""Hashing of long prompts: bounded between two steps, and without an effect on anything else."""

import pytest
from starling_engine.scheduler import prompt_hashing

from tests.engine.core.test_scheduler import params, prompt_of
from tests.engine.kv_offload.test_offload import Secondary, engine_of
from tests.engine.toy_engine import ToyEngine, expected_output

SLICE = 32


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_hashing, "MAX_HASHED_TOKENS", SLICE)


def num_hashed_tokens(engine: ToyEngine) -> int:
    return sum(request.blocks.chain.length for request in engine.scheduler.requests.values())


@pytest.mark.parametrize("secondary", [None, {}], ids=["device alone", "secondary tier"])
def test_long_prompts_are_hashed_between_the_tokens_of_others(secondary: Secondary | None) -> None:
    engine = engine_of(secondary=secondary) if secondary is not None else ToyEngine(num_blocks=200)
    engine.add("stream", prompt_of(4), params(100))
    engine.step()
    before, hashed = num_hashed_tokens(engine), []
    for number in range(3):
        engine.add(f"long {number}", prompt_of(100, number), params(2))
    while any(f"long {number}" not in engine.outputs for number in range(3)):
        tokens = len(engine.outputs["stream"])
        engine.step()
        assert len(engine.outputs["stream"]) == tokens + 1
        hashed.append(num_hashed_tokens(engine) - before)
        before = num_hashed_tokens(engine)
    assert max(hashed) <= 2 * SLICE, "one slice for arriving requests, one for a plan"
    assert len(hashed) > 300 // SLICE // 2
    engine.run()
    for number in range(3):
        assert engine.outputs[f"long {number}"] == expected_output(prompt_of(100, number), params(2), 0, 128)


def test_a_prompt_is_found_as_before() -> None:
    engine = ToyEngine(num_blocks=200)
    for name in ("first", "again"):
        engine.add(name, prompt_of(100), params(2))
        engine.run()
    assert engine.cached == {"first": 0, "again": 96}


def test_a_short_prompt_of_higher_priority_is_hashed_before_long_ones() -> None:
    engine = ToyEngine(num_blocks=200, policy="priority")
    for number in range(4):
        engine.add(f"long {number}", prompt_of(120, number), params(2), priority=1)
    engine.add("urgent", prompt_of(10, 9), params(2), priority=0, arrival=1.0)
    engine.run()
    assert next(iter(engine.finished)) == "urgent"


def test_aborted_requests_hold_up_nobody() -> None:
    engine = ToyEngine(num_blocks=200)
    engine.add("stream", prompt_of(4), params(20))
    for number in range(3):
        engine.add(f"long {number}", prompt_of(100, number), params(2))
    engine.step()
    engine.scheduler.abort("long 0")
    engine.scheduler.abort("long 2")
    engine.run()
    engine.add("next", prompt_of(100, 7), params(2))
    engine.run()
    assert set(engine.finished) == {"stream", "long 1", "next"}
