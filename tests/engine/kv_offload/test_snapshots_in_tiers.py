"""Recurrent state in tiers: a prefix is found up to a snapshot that has all of its pieces. The toy worker checks each state."""

import random
from collections import Counter

import pytest
from starling_engine.kv.events import event_hash
from starling_engine.kv.spec import KVGroup
from starling_engine.kv_offload.secondary.base import CHUNK

from tests.engine.kv_offload.test_kv_events_tiers import Failing
from tests.engine.kv_offload.test_offload import Secondary, engine_of, params, prompt_of, run_one
from tests.engine.listener import Router, heard
from tests.engine.toy_engine import ToyEngine, expected_output, state_of

STATE = 20
"""Blocks: with blocks of 16 tokens, five pieces."""


def hybrid(**fields: object) -> ToyEngine:
    return engine_of(**{"state": state_of(STATE), "num_blocks": 160, "block_size": 16, **fields})


def snapshots(secondary: Secondary) -> dict[bytes, int]:
    """Returns how many pieces of each snapshot there are."""
    names = [name for group, name in secondary if group]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("window", [0, 40, 100])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_new_engine_finds_a_prefix_up_to_its_last_snapshot(depth: int, window: int) -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    assert run_one(hybrid(secondary=secondary, window=window), "old", prompt) == 0
    engine = hybrid(secondary=secondary, window=window, depth=depth)
    assert run_one(engine, "new", prompt) == 256
    assert run_one(engine, "on the device", prompt) == 256
    assert run_one(engine, "part", prompt[:250]) == 192, "spaced out over the prompt"
    engine.scheduler.reset_prefix_cache()
    assert run_one(engine, "continued", prompt + prompt_of(60, 1)) == 256


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_alone_is_found_too(depth: int) -> None:
    """Nothing but pieces of snapshots is stored."""
    secondary: Secondary = {}
    prompt = prompt_of(300)
    assert run_one(hybrid(secondary=secondary, groups=[]), "old", prompt) == 0
    assert {group for group, _ in secondary} == set(range(5))
    engine = hybrid(secondary=secondary, groups=[], depth=depth)
    assert [run_one(engine, name, prompt[:length]) for name, length in (("a", 300), ("b", 300), ("c", 250))] == [256, 256, 192]
    engine.scheduler.reset_prefix_cache()
    assert run_one(engine, "continued", prompt + prompt_of(60, 1)) == 256


def test_the_next_turn_begins_at_the_last_snapshot_of_the_output() -> None:
    """The last snapshot is the only one of the output that was stored, when the request ended."""
    secondary: Secondary = {}
    old = hybrid(secondary=secondary)
    prompt = prompt_of(70)
    run_one(old, "old", prompt, 250)
    assert [*snapshots(secondary).values()] == [5, 5], "of the prompt and of the output"
    turn = prompt + old.outputs["old"] + prompt_of(10, 1)
    assert run_one(hybrid(secondary=secondary), "turn", turn) == 256, "of 320 tokens"


def test_a_snapshot_that_lacks_a_piece_is_none() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(hybrid(secondary=secondary), "old", prompt)
    last = next(reversed(snapshots(secondary)))
    del secondary[3, last]
    assert run_one(hybrid(secondary=secondary), "new", prompt) == 192


def test_a_snapshot_that_lacks_a_piece_in_slots_is_none() -> None:
    engine = hybrid()
    engine.offload.device._under_pressure = lambda: True
    prompt = prompt_of(300)
    run_one(engine, "old", prompt)
    while engine.offload.has_pending_work or engine.offload.device._unstored:
        engine.step()
    engine.scheduler.reset_device_cache()
    assert run_one(engine, "again", prompt) == 256
    engine.scheduler.reset_device_cache()
    last = [name for group, name in engine.offload.primary._slots if group][-1]
    engine.offload.primary.drop((3, last))
    assert run_one(engine, "without", prompt) == 192


def test_a_piece_that_left_its_slot_is_fetched_again() -> None:
    engine = hybrid(secondary={})
    prompt = prompt_of(300)
    run_one(engine, "old", prompt)
    engine.scheduler.reset_device_cache()
    last = next(reversed(snapshots(engine.tiers.secondary)))
    engine.offload.primary.drop((3, last))
    assert run_one(engine, "again", prompt) == 256
    assert engine.tiers.counts["promote"] == 1


def test_keys_and_values_alone_are_of_no_use() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(hybrid(secondary=secondary), "old", prompt)
    for group, name in [chunk for chunk in secondary if chunk[0]]:
        del secondary[group, name]
    engine = hybrid(secondary=secondary)
    assert run_one(engine, "new", prompt) == 0
    assert not engine.tiers.counts["promote"]


def test_a_snapshot_alone_is_of_no_use() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(hybrid(secondary=secondary), "old", prompt)
    third = [chunk for chunk in secondary if not chunk[0]][2]
    del secondary[third]
    assert run_one(hybrid(secondary=secondary), "new", prompt) == 128


def test_what_the_device_gives_up_is_found_in_the_cpu_tier() -> None:
    engine = hybrid(num_blocks=200, slots=200)
    prompt = prompt_of(200)
    run_one(engine, "first", prompt)
    for i in range(1, 6):
        run_one(engine, f"other {i}", prompt_of(200, i))
    assert run_one(engine, "again", prompt) == 192
    assert engine.tiers.counts["load"] >= 3 + 5


def test_a_state_is_loaded_where_there_is_no_room_for_a_snapshot_beside_it() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(200)
    run_one(hybrid(secondary=secondary), "old", prompt)
    engine = hybrid(secondary=secondary, num_blocks=1 + STATE + 14, max_model_len=220)
    assert run_one(engine, "new", prompt) == 192
    assert engine.kv.find_snapshot(next(reversed(snapshots(secondary)))) is None


def test_a_swapped_request_goes_on_from_its_last_snapshot() -> None:
    engine = hybrid(preempt="swap")
    engine.add("a", prompt_of(100), params(150))
    while len(engine.outputs.get("a", ())) < 120:
        engine.step()
    request = engine.scheduler.requests["a"]
    assert engine.offload.device.swap_out(request)
    engine.scheduler._preempt(request)
    engine._transfer()
    engine.kv.pool.evict_free_blocks()
    before = sum(plan.total_tokens for plan in engine.plans)
    engine.run()
    assert engine.tiers.counts["load"] == 3 + 5
    assert sum(plan.total_tokens for plan in engine.plans) - before <= 2 * CHUNK, "the snapshot at 192 tokens, and 58 behind it"
    assert engine.outputs["a"] == expected_output(prompt_of(100), params(150), 0, 400)


def test_a_snapshot_that_is_being_stored_is_not_taken_for_a_state() -> None:
    """A request finds it where there is no room for both. Three of its pieces are on their way to slots, the others find none."""
    engine = hybrid(num_blocks=1 + 50, max_model_len=140, slots=4)
    prompt, device = prompt_of(70), engine.offload.device
    device._under_pressure = lambda: False
    run_one(engine, "a", prompt, 2)
    device._under_pressure = lambda: True
    device.store_next(0)
    (order,) = engine.offload.take_orders()
    held = [block for chunk in order.chunks for block in chunk.blocks]
    assert len(held) == 4 + 12
    others, before = engine.kv.pool.take(8), engine.worker.pages[held].copy()
    engine.add("b", prompt, params(2))
    while "b" not in engine.finished:
        engine.step()
    assert engine.cached["b"] == 64 and engine.kv.find_snapshot(order.chunks[0].name) is None, "it was taken"
    assert (engine.worker.pages[held] == before).all()
    for block in others:
        engine.kv.pool.release(block)
    engine.tiers.orders.append(order)
    engine.run()
    assert engine.outputs["b"] == expected_output(prompt, params(2), 0, 140)


def test_a_load_waits_for_the_step_that_copies_a_snapshot_from_its_blocks() -> None:
    """One request begins with a snapshot on the device; the next one, in the same step, takes its blocks for what it loads."""
    one, other = prompt_of(100), prompt_of(200, 1)
    for seed in range(8):
        engine = hybrid(num_blocks=1 + 5 * STATE + 13, max_model_len=230, rng=random.Random(seed))
        device = engine.offload.device
        device._under_pressure = lambda: True
        run_one(engine, "other", other, 1)
        while engine.offload.has_pending_work or device._unstored:
            engine.step()
        device._under_pressure = lambda: False
        engine.kv.pool.evict_free_blocks()
        run_one(engine, "a", one, 1)
        kept = engine.kv.pool.take(23)
        for name, prompt in (("b", one), ("c", other)):
            engine.add(name, prompt, params(3))
        engine.step()
        assert len(engine.scheduler.running) == 2
        for block in kept:
            engine.kv.pool.release(block)
        engine.run()
        assert engine.cached == {"other": 0, "a": 0, "b": 64, "c": 192}
        for name, prompt in (("b", one), ("c", other)):
            assert engine.outputs[name] == expected_output(prompt, params(3), 0, 230)


def test_snapshots_of_failed_rows_are_forgotten() -> None:
    engine = hybrid()
    prompt = prompt_of(200)
    engine.worker.broken = {prompt[0]}
    engine.offload.device._under_pressure = lambda: True
    engine.add("a", prompt, params(4))
    engine.run()
    engine.worker.broken = set()
    engine.kv.pool.evict_free_blocks()
    assert engine.finished["a"].finish_reason == "error" and not len(engine.offload.primary)
    assert run_one(engine, "b", prompt) == 0


def test_a_hit_is_no_longer_than_there_are_slots_for() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(hybrid(secondary=secondary), "old", prompt)
    assert run_one(hybrid(secondary=secondary, slots=12), "new", prompt) == 192, "three chunks and five pieces, beside four"


@pytest.mark.parametrize("groups", [None, []], ids=["beside keys and values", "alone"])
def test_listeners_are_told_of_snapshots_that_have_all_pieces(
    groups: list[KVGroup] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes and goes as a whole, on the device and in slots, where some pieces do not arrive."""
    engine, router = hybrid(events=True, slots=17, groups=groups), Router()
    monkeypatch.setattr(engine.tiers, "_do", Failing(engine, random.Random(2)))
    engine.offload.device._under_pressure = lambda: True
    most = least = 0
    for i in range(12):
        engine.add(str(i), prompt_of(200, i % 4), params(4))
        while engine.scheduler.has_work or engine.offload.has_pending_work or engine.offload.device._unstored:
            engine.step()
            router.hear(heard(engine.log))
            pieces = Counter(name for group, name in engine.offload.primary._there() if group >= len(engine.kv.groups))
            assert router.snapshots["CPU"] == {event_hash(name) for name, count in pieces.items() if count == 5}
            most, least = max(most, len(router.snapshots["CPU"])), max(least, len(pieces) - len(router.snapshots["CPU"]))
        engine.offload.primary.check_integrity()
        assert len(router.snapshots["GPU"]) >= 2
    assert engine.offload.stats["cpu"].evictions_total and most >= 2 and least
    assert bool(router.cached["CPU"][0]) == bool(engine.kv.groups)
