"""A step that fails: the request to blame is found by halves, and nobody else ends for it."""

import logging

import pytest
from starling_engine.params import SamplingParams

from tests.engine.toy_engine import ToyEngine, expected_output

BAD = 49


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failing_request_is_found_and_the_others_go_on(depth: int) -> None:
    engine = ToyEngine(depth=depth)
    engine.worker.fail_on = {BAD}
    engine.add("good", [1, 2, 3], params(20))
    engine.step()
    engine.add("bad", [BAD, 2, 3], params(20))
    engine.add("fine", [4, 5, 6], params(20))
    engine.run()
    assert engine.finished["bad"].error == "boom"
    for name, prompt in (("good", [1, 2, 3]), ("fine", [4, 5, 6])):
        assert engine.outputs[name] == expected_output(prompt, params(20), 0, 128)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_bystander_of_many_faults_is_not_to_blame(depth: int) -> None:
    engine = ToyEngine(depth=depth)
    engine.worker.fail_on = {BAD}
    engine.add("bystander", [1, 2, 3], params(100))
    for number in range(6):
        engine.step()
        engine.add(f"bad {number}", [BAD, number, 3], params(20))
        while f"bad {number}" not in engine.finished:
            engine.step()
    engine.run()
    assert engine.outputs["bystander"] == expected_output([1, 2, 3], params(100), 0, 128)
    assert {delta.error for name, delta in engine.finished.items() if name != "bystander"} == {"boom"}


def test_a_request_that_fails_late_in_its_prompt_is_found_too() -> None:
    """Each passes its first chunk alone, so nothing is known before it has come as far as the step that failed."""
    engine = ToyEngine(budget=32, prefix_caching=False)
    engine.worker.fail_from = {BAD: 50}
    prompts = {name: [first, *range(40)] for name, first in (("a", 1), ("bad", BAD), ("b", 2))}
    for name, prompt in prompts.items():
        engine.add(name, prompt, params(30))
    engine.run()
    assert engine.finished["bad"].error == "boom"
    for name in ("a", "b"):
        assert engine.outputs[name] == expected_output(prompts[name], params(30), 0, 128)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_of_many_is_found_in_few_steps(depth: int) -> None:
    engine = ToyEngine(depth=depth, max_num_seqs=64, budget=256, num_blocks=256)
    engine.worker.fail_on = {BAD}
    for number in range(63):
        engine.add(str(number), [1, number % 50, 3], params(60))
    engine.add("bad", [BAD, 2, 3], params(20))
    steps = 0
    while len([tokens for name, tokens in engine.outputs.items() if tokens and name != "bad"]) < 63:
        engine.step()
        steps += 1
    assert steps <= 4 * 6, "halves of halves, and others have every second step"
    engine.run()
    assert engine.finished["bad"].error == "boom"


def test_new_requests_run_while_the_culprit_is_looked_for() -> None:
    engine = ToyEngine(max_num_seqs=32, budget=128, num_blocks=128)
    engine.worker.fail_on = {BAD}
    for number in range(15):
        engine.add(str(number), [1, number, 3], params(60))
    engine.add("bad", [BAD, 2, 3], params(20))
    engine.step()
    engine.add("new", [7, 8, 9], params(3))
    while "new" not in engine.finished:
        engine.step()
    assert "bad" not in engine.finished, "it ran before the search was over"
    engine.run()


def test_a_suspect_that_is_aborted_is_forgotten() -> None:
    engine = ToyEngine()
    engine.worker.fail_on = {BAD}
    engine.add("good", [1, 2, 3], params(20))
    engine.add("bad", [BAD, 2, 3], params(20))
    engine.step()
    engine.scheduler.abort("bad")
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.outputs["good"] == expected_output([1, 2, 3], params(20), 0, 128)


def test_a_suspect_that_was_being_tried_gives_its_blocks_to_one_that_failed_later() -> None:
    """Another step in flight may fail while a suspect is in the midst of its prompt; the pool holds one of them."""
    engine = ToyEngine(num_blocks=10, budget=16)
    prompts = {name: [first, *range(59)] for first, name in enumerate("ab", 1)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, params(4))
    engine.step()
    first, second = (engine.scheduler.requests[name] for name in "ab")
    assert first.slot >= 0 and second.slot < 0
    for request in (first, second):
        request.failed_at = 60
        engine.scheduler._suspects.add([request])
    engine.run()
    for name, prompt in prompts.items():
        assert engine.outputs[name] == expected_output(prompt, params(4), 0, 128)


def test_the_log_has_the_fate_of_each_request(caplog: pytest.LogCaptureFixture) -> None:
    """Requests in the log, by id: refused, put off and started, preempted, computed again, ended for an error."""
    caplog.set_level(logging.INFO, "starling.scheduler")
    engine = ToyEngine(num_blocks=9, max_num_waiting=1, max_num_seqs=3, prefix_caching=False)
    engine.worker.fail_on = {BAD}
    engine.add("long", list(range(30)), params(40))
    engine.add("short", list(range(20)), params(40))
    engine.add("late", list(range(25)), params(4))
    engine.add("much", list(range(8)) * 16, params(4))
    engine.run()
    engine.add("bad", [BAD, 2, 3], params(20))
    engine.add("fine", [4, 5, 6], params(20))
    engine.run()
    engine.worker.broken = {48}
    engine.add("broken", [48, 2, 3], params(20))
    engine.run()
    names = ("short", "late", "much", "fine", "bad", "broken")
    said = {name: [line for line in caplog.messages if line.startswith(f"{name} ")] for name in names}
    assert said["short"][0] == "short is preempted at 24 of 25 tokens (recompute): short wants 1 blocks, 0 free"
    assert said["late"][0].startswith("late is put off: up to 4 blocks wanted for 25 tokens")
    assert "late starts after it was put off" in said["late"]
    assert said["bad"][-1].startswith("bad ends: step ") and said["bad"][-1].endswith("which ran it alone, failed: boom")
    assert said["broken"] == ["broken ends with 3 tokens: not finite"]
    assert said["much"] == [
        "much is refused: prompt: the prompt has 128 tokens, but at most 64 fit the model's length and the KV cache"
    ]
    assert said["fine"][0].startswith("fine is computed again") and said["fine"][0].endswith("failed: boom")
