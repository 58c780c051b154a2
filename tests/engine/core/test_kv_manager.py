"""Reservations, windows and prefix hits: reserved blocks can always be taken."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starling_engine.kv.manager import KVManager
from starling_engine.kv.spec import KVGroup, KVSpec, WindowSpec
from starling_engine.params import SamplingParams

from tests.engine.toy_engine import ToyEngine, expected_output, groups_of

FULL = KVSpec(8, 1, 8, 4)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize(("window", "chunk"), [(16, 32), (20, 24), (64, 8)])
def test_an_admitted_prompt_gets_its_blocks_whatever_others_take(window: int, chunk: int) -> None:
    """Blocks that its window frees stay reserved until it is computed; else it is preempted half-way."""
    kv = KVManager(groups_of(8, window), 60, max_in_flight=chunk)
    sequence = kv.new_sequence(b"root")
    assert kv.admit(sequence, [[], []], 240)
    for end in [*range(chunk, 240, chunk), 240]:
        kv.pool.take(kv.num_available)
        kv.grow(sequence, end)
        kv.free_behind_window(sequence, end)
    assert sequence.num_blocks == 30 and sequence.reserved == 0
    kv.release(sequence)
    assert kv.reserved == 0


@pytest.mark.parametrize("held", [False, True])
def test_found_blocks_that_others_hold_make_no_room_when_they_leave_the_window(held: bool) -> None:
    kv = KVManager(groups_of(8, 32), 80, max_in_flight=16)
    tokens = list(range(240))
    first = kv.new_sequence(b"root")
    assert kv.admit(first, [[], []], 120)
    kv.grow(first, 120)
    kv.cache_blocks(first, tokens, 120)
    kv.free_behind_window(first, 120)
    if not held:
        kv.release(first)
    second = kv.new_sequence(b"root")
    found = kv.find_prefix(second, tokens)
    assert found.length == 15 and kv.admit(second, found.tables, 240)
    for end in range(136, 241, 8):
        kv.pool.take(kv.num_available)
        kv.grow(second, end)
        kv.free_behind_window(second, end)
    assert second.num_blocks == 30


def test_admission_leaves_a_block_for_each_group_of_others() -> None:
    groups = [KVGroup(FULL, (0,)), *(KVGroup(WindowSpec(8, 1, 8, 4, 64), (layer,)) for layer in range(1, 7))]
    engine = ToyEngine(groups=groups, num_blocks=64, prefix_caching=False)
    for number in range(3):
        engine.add(f"first {number}", [number, *range(11)], params(40))
    engine.step()
    engine.add("next", [9, *range(8)], params(3))
    while not any(request.record.id == "next" for request in engine.scheduler.running):
        engine.step()
    assert engine.kv.num_available >= 7 * (len(engine.scheduler.running) - 1), "each block boundary wants one a group"
    engine.run()


def test_blocks_of_a_failed_row_are_uncached() -> None:
    engine = ToyEngine(budget=16)
    engine.worker.broken = {7}
    prompt = [7, *range(40)]
    engine.add("a", prompt, params(4))
    engine.run()
    assert engine.finished["a"].error == "not finite"
    engine.worker.broken = set()
    engine.add("b", prompt, params(4))
    engine.run()
    assert engine.cached["b"] == 0
    assert engine.outputs["b"] == expected_output(prompt, params(4), 0, 128)


def test_blocks_that_were_cached_before_the_error_stay() -> None:
    engine = ToyEngine()
    shared = [7, *range(31)]
    engine.add("a", shared, params(4))
    engine.run()
    engine.worker.broken = {7}
    engine.add("b", [*shared, *range(20)], params(4))
    engine.run()
    engine.worker.broken = set()
    engine.add("c", [*shared, *range(20)], params(4))
    engine.run()
    assert (engine.finished["b"].error, engine.cached["c"]) == ("not finite", 32)


def test_a_prefix_is_not_looked_for_again_while_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of the queue may wait for blocks for many steps."""
    engine = ToyEngine(num_blocks=14, block_size=8, max_model_len=128)
    engine.add("running", list(range(60)), params(40))
    engine.step()
    engine.add("waiting", list(range(1, 61)), params(4))
    looks = itertools.count()
    look = KVManager._hit_table
    monkeypatch.setattr(KVManager, "_hit_table", lambda *args: (next(looks), look(*args))[1])
    for _ in range(3):
        engine.step()
    assert next(looks) == 1, "no block was named or taken"
    engine.run()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_hit_is_the_longest_that_every_group_can_go_on_from(data: st.DataObject) -> None:
    window, count = data.draw(st.sampled_from([0, 1, 2, 8, 9, 20])), data.draw(st.integers(0, 12))
    kv = KVManager(groups_of(8, window)[-1:], 40)
    hashes = [bytes([number]) * 32 for number in range(count)]
    cached = data.draw(st.sets(st.sampled_from(range(count)))) if count else set()
    for number in cached:
        (block,) = kv.pool.take(1)
        kv.pool.cache_block(0, hashes[number], block)
    limit = data.draw(st.integers(0, count))
    spec = kv.groups[0].spec
    possible = [length for length in range(limit + 1) if cached.issuperset(range(spec.first_needed_block(length * 8), length))]
    assert kv._hit_length(0, hashes, limit) == max(possible)
