"""Requests that wait for chunks from outside while slots are few: who has room, who takes turns, and for how long."""

import pytest
from starling_engine.kv.events import BlockSpan
from starling_engine.kv_offload.pin_quota import PinQuota
from starling_engine.kv_offload.primary import PrimaryIndex

from tests.engine.kv_offload.test_offload import LENGTH, Secondary, engine_of, finish, params, prompt_of, run_one
from tests.engine.toy_engine import ToyEngine, expected_output


def left_in_secondary(*prompts: list[int]) -> Secondary:
    """What an engine that computed these wrote there."""
    secondary: Secondary = {}
    old = engine_of(secondary=secondary, num_blocks=100 * len(prompts), slots=40 * len(prompts))
    for number, prompt in enumerate(prompts):
        run_one(old, str(number), prompt)
    return secondary


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_requests_that_find_no_room_fetch_in_turns(max_num_seqs: int) -> None:
    """There are slots for one of them at a time."""
    prompts = [prompt_of(300, i) for i in range(6)]
    engine = engine_of(secondary=left_in_secondary(*prompts), num_blocks=400, slots=7, max_num_seqs=max_num_seqs)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params(3))
    engine.run()
    assert set(engine.cached.values()) == {256}
    assert engine.tiers.counts["promote"] == 4 * 6, "none twice"
    for number, prompt in enumerate(prompts):
        assert engine.outputs[str(number)] == expected_output(prompt, params(3), 0, LENGTH)


def test_what_was_fetched_stays_till_it_is_used() -> None:
    """A neighbour that fills all slots with what it computes takes none of these."""
    prompt = prompt_of(300)
    engine = engine_of(secondary=left_in_secondary(prompt), num_blocks=200, slots=5, max_num_seqs=1)
    engine.add("runs", prompt_of(300, 1), params(90))
    engine.step()
    engine.add("waits", prompt, params(3))
    engine.run()
    assert engine.cached["waits"] == 256 and engine.tiers.counts["promote"] == 4


def holder_and_late(engine: ToyEngine, held: list[int], late: list[int]) -> None:
    """One that has fetched, and one before it in the queue that found no room for its own."""
    engine.add("holder", held, params(3), priority=2, arrival=1.0)
    for _ in range(50):
        engine.step()
    assert not engine.scheduler.requests["holder"].gates
    engine.add("late", late, params(3), priority=1, arrival=2.0)


def test_who_waits_for_room_lets_the_one_that_has_it_pass() -> None:
    """Though it is first, and there is one place for both."""
    held, late = prompt_of(300), prompt_of(300, 1)
    engine = engine_of(secondary=left_in_secondary(held, late), num_blocks=100, slots=7, max_num_seqs=1, policy="priority")
    engine.add("runs", prompt_of(20, 2), params(100))
    engine.step()
    holder_and_late(engine, held, late)
    engine.run()
    assert engine.cached["holder"] == engine.cached["late"] == 256


def test_room_is_not_waited_for_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds it cannot start, as there are no blocks for it."""
    held, late = prompt_of(300), prompt_of(140, 1)
    engine = engine_of(secondary=left_in_secondary(held, late), num_blocks=70, slots=7, policy="priority")
    now = [0.0]
    monkeypatch.setattr(engine.offload.jobs, "clock", lambda: now[0])
    engine.add("runs", prompt_of(300, 2), params(90))
    for _ in range(5):
        engine.step()
    holder_and_late(engine, held, late)
    for _ in range(10):
        engine.step()
    assert "late" not in engine.outputs and "runs" not in engine.finished
    now[0] += 3.1
    finish(engine, "late", 10)
    assert engine.cached["late"] == 0 and "holder" not in engine.outputs
    engine.run()
    assert engine.cached["holder"] == 256


def test_who_finds_no_room_for_what_is_there_does_not_ask_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There would be room for the one chunk that is missing, but not for the five with it that are in slots."""
    prompt, now = prompt_of(390), [0.0]
    engine = engine_of(secondary=left_in_secondary(prompt), num_blocks=200, slots=8)
    run_one(engine, "beginning", prompt[:321])
    engine.kv.pool.evict_free_blocks()
    monkeypatch.setattr(engine.offload.jobs, "clock", lambda: now[0])
    pins, lookups, do = engine.offload.pins, [], engine.tiers._do
    monkeypatch.setattr(engine.tiers, "_do", lambda order: (lookups.append(order), do(order))[1])
    pins.pin("other", [(0, bytes(32))])
    engine.add("late", prompt, params(3))
    for _ in range(50):
        engine.step()
    assert [order.kind for order in lookups] == ["look_up"] and "late" not in engine.outputs
    now[0] += 3.1
    finish(engine, "late")
    assert engine.cached["late"] == 320
    pins.forget("other")
    engine.run()


def test_what_one_has_claimed_is_room_for_it() -> None:
    primary = PrimaryIndex(16, "lru")
    pins, chunks = PinQuota(primary), [(0, bytes([number])) for number in range(24)]
    for chunk in chunks[:12]:
        primary.allocate(chunk, BlockSpan([], None, (), None))
    primary.settle(dict.fromkeys(chunks[:12], True))
    pins.pin("one", chunks[:8])
    assert pins.has_room("one", chunks[:20]), "alone it may have what there is, with what it has"
    pins.pin("two", chunks[20:21])
    assert not pins.has_room("one", chunks[:9]), "beside others its eight are half of the slots"
    assert pins.has_room("one", chunks[:8]) and not pins.has_room("two", chunks[20:22])
    pins.forget("two")
    assert pins.has_room("one", chunks[:20])


@pytest.mark.parametrize("how", ["abort", "hand over", "reset"])
def test_nothing_is_kept_for_those_that_are_gone(how: str) -> None:
    prompt = prompt_of(300)
    engine = engine_of(secondary=left_in_secondary(prompt), num_blocks=200, max_num_seqs=1)
    engine.add("runs", prompt_of(20, 1), params(100))
    engine.step()
    engine.add("waits", prompt, params(3))
    for _ in range(20):
        engine.step()
    pins = engine.offload.pins
    assert pins.num_pins == 4
    if how == "abort":
        engine.scheduler.abort("waits")
    elif how == "hand over":
        engine.scheduler.hand_over()
    else:
        engine.scheduler.reset_prefix_cache()
    assert pins.num_pins == 0 and not pins.requests
    engine.scheduler.check_integrity()
    engine.run()
