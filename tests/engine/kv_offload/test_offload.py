"""The scheduler with tiers below the device, on a toy worker that checks every page it reads."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starling_engine.kv_offload.orders import TransferDone, TransferOrder
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.kv_offload.write_back import PAUSE
from starling_engine.params import SamplingParams

from tests.engine.toy_engine import ToyConstraint, ToyEngine, ToyTiers, expected_output, state_of

Secondary = dict[tuple[int, bytes], np.ndarray]
LENGTH = 400


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def engine_of(**fields: object) -> ToyEngine:
    return ToyEngine(**{"num_blocks": 60, "max_model_len": LENGTH, "slots": 40, "budget": 128, **fields})


def run_one(engine: ToyEngine, name: str, prompt: list[int], count: int = 3) -> int:
    """Returns the cached tokens."""
    assert engine.add(name, prompt, params(count)) is None
    engine.run()
    assert engine.outputs[name] == expected_output(prompt, params(count), 0, engine.config.max_model_len)
    return engine.cached[name]


def finish(engine: ToyEngine, name: str, limit: int = 200) -> None:
    for _ in range(limit):
        if name in engine.finished:
            return
        engine.step()
    raise AssertionError(name)


def emptied(engine: ToyEngine) -> ToyEngine:
    """With an empty device and CPU tier."""
    engine.scheduler.reset_prefix_cache()
    cpu = engine.scheduler.offload.stats["cpu"]
    assert cpu.bytes == cpu.objects == 0
    return engine


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_the_device_gives_up_is_found_in_the_cpu_tier(block_size: int, policy: str) -> None:
    engine = engine_of(block_size=block_size, num_blocks=480 // block_size, cpu_policy=policy)
    first = prompt_of(200)
    assert run_one(engine, "first", first) == 0
    for i in range(1, 6):
        run_one(engine, f"other {i}", prompt_of(200, i))
    assert run_one(engine, "again", first) == 192, "whole chunks, from slots"
    assert engine.tiers.counts["load"] == 3


def filled(slots: int, **fields: object) -> ToyEngine:
    """All that is computed comes to its slots at once."""
    engine = engine_of(slots=slots, num_blocks=600, max_model_len=2000, **fields)
    engine.offload.device._under_pressure = lambda: True
    return engine


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("chunks", [6, 20])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prefix_loses_its_end_first(policy: str, chunks: int, window: int) -> None:
    """It is of no use without its beginning, also where several orders have stored it."""
    groups = 2 if window else 1
    engine = filled(groups * (chunks + 4), cpu_policy=policy, window=window)
    prompt = prompt_of(chunks * CHUNK + 10)
    run_one(engine, "first", prompt)
    run_one(engine, "other", prompt_of(8 * CHUNK + 10, 1))
    engine.kv.pool.evict_free_blocks()
    assert run_one(engine, "again", prompt) == (chunks - 4) * CHUNK


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_the_device_has_of_a_prefix_stays_in_slots_as_long_as_the_rest(policy: str) -> None:
    """The rest is loaded, so that the beginning is wanted as well."""
    engine = filled(12, cpu_policy=policy)
    prompt, other = prompt_of(6 * CHUNK + 10), prompt_of(6 * CHUNK + 10, 1)
    run_one(engine, "first", prompt)
    run_one(engine, "other", other)
    engine.kv.pool.evict_free_blocks()
    engine.add("beginning", prompt[: 3 * CHUNK + 1], SamplingParams(max_tokens=1, prompt_logprobs=0))  # computed
    engine.run()
    assert run_one(engine, "again", prompt) == 6 * CHUNK
    engine.kv.pool.evict_free_blocks()
    run_one(engine, "third", prompt_of(5 * CHUNK + 10, 2))
    engine.kv.pool.evict_free_blocks()
    assert run_one(engine, "at last", prompt) == 6 * CHUNK


def test_what_may_not_be_held_now_is_stored_later() -> None:
    """Its blocks are free, and promised to others that start; then they are not."""
    engine = filled(40)
    device = engine.offload.device
    device._under_pressure = lambda: False
    run_one(engine, "ended", prompt_of(4 * CHUNK + 10))
    device._under_pressure = lambda: True
    engine.kv.reserved = engine.kv.pool.num_free
    device.store_next(0)
    assert not engine.offload.take_orders()
    engine.kv.reserved = 0
    device.store_next(0)
    (order,) = engine.offload.take_orders()
    assert len(order.chunks) == 4
    engine.tiers.orders.append(order)
    engine.run()
    assert not device._unstored and len(engine.offload.primary) == 4


def test_what_need_not_be_stored_keeps_nothing_else_from_it() -> None:
    """Many chunks are noted that slots have already; the next order is of those that they have not."""
    engine = filled(40)
    known, new = prompt_of(20 * CHUNK + 10), prompt_of(6 * CHUNK + 10, 1)
    run_one(engine, "known", known)
    engine.kv.pool.evict_free_blocks()
    engine.offload.device._under_pressure = lambda: False
    for name, prompt in (("computed", known), ("new", new)):
        engine.add(name, prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))  # nothing of it comes from slots
        engine.run()
    assert len(engine.offload.device._unstored) == 26
    engine.offload.device._under_pressure = lambda: True
    engine.offload.device.store_next(0)
    (order,) = engine.offload.take_orders()
    assert order.kind == "store" and len(order.chunks) == 6
    engine.tiers.orders.append(order)
    engine.run()


def test_without_pressure_nothing_is_copied() -> None:
    engine = engine_of(num_blocks=1000)
    for i in range(5):
        run_one(engine, str(i), prompt_of(200, i))
    assert not engine.tiers.counts


@pytest.mark.parametrize("window", [0, 40, 100])
def test_a_new_engine_finds_what_the_old_one_left_outside(window: int) -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    assert run_one(engine_of(secondary=secondary, window=window, num_blocks=120), "old", prompt) == 0
    engine = engine_of(secondary=secondary, window=window, num_blocks=120)
    assert run_one(engine, "new", prompt) == 256
    assert run_one(engine, "continued", prompt + prompt_of(60, 1)) >= 256


@pytest.mark.parametrize("block_size", [8, 32])
def test_another_block_size_finds_it_too(block_size: int) -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(engine_of(secondary=secondary, block_size=16), "old", prompt)
    assert run_one(engine_of(secondary=secondary, block_size=block_size), "new", prompt) == 256


def test_the_device_has_the_beginning_and_slots_the_rest() -> None:
    engine = engine_of(secondary={}, block_size=8)
    prompt = prompt_of(300)
    run_one(engine, "old", prompt)
    engine.kv.pool.evict_free_blocks()
    run_one(engine, "beginning", prompt[:100])
    assert run_one(engine, "all", prompt) == 256


def test_what_cannot_be_fetched_is_computed() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(engine_of(secondary=secondary), "old", prompt)
    engine = engine_of(secondary=secondary)
    engine.tiers.fails = 1.0
    assert run_one(engine, "new", prompt) == 0


def test_a_tier_outside_that_does_not_answer_holds_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(engine_of(secondary=secondary), "old", prompt)
    engine = engine_of(secondary=secondary)
    now = [0.0]
    monkeypatch.setattr(engine.offload.jobs, "clock", lambda: now[0])
    monkeypatch.setattr(engine.tiers, "carry_out", lambda **_: [])
    engine.add("new", prompt, params(3))
    for _ in range(5):
        engine.step()
    assert "new" not in engine.outputs, "it is worth waiting a little"
    now[0] += 10
    for _ in range(10):
        engine.step()
    assert engine.outputs["new"] == expected_output(prompt, params(3), 0, LENGTH)
    monkeypatch.undo()
    engine.run()


def test_what_has_come_in_time_is_used_though_one_chunk_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are fetched in batches, from the beginning of the prefix on."""
    secondary: Secondary = {}
    long, prompt = {"num_blocks": 400, "max_model_len": 2600, "slots": 100}, prompt_of(2500)
    old = engine_of(secondary=secondary, **long)
    old.add("old", prompt, params(1))
    old.run()
    engine = engine_of(secondary=secondary, **long)
    now, hung, carry_out = [0.0], [], engine.tiers.carry_out

    def carry_out_but_one(*, all_of_it: bool = False) -> list[TransferDone]:
        hung.extend(order for order in engine.tiers.orders if order.kind == "promote" and order.chunks[-1].name == slow)
        engine.tiers.orders = [order for order in engine.tiers.orders if order not in hung]
        return carry_out(all_of_it=all_of_it)

    engine.add("new", prompt, params(1))
    request = engine.scheduler.requests["new"]
    names = engine.offload.promotions._map.hashes(request)
    assert len(names) == 39
    slow = names[-1]
    monkeypatch.setattr(engine.offload.jobs, "clock", lambda: now[0])
    monkeypatch.setattr(engine.tiers, "carry_out", carry_out_but_one)
    for _ in range(20):
        engine.step()
    assert "new" not in engine.finished and len(hung) == 1
    now[0] += 3.1
    finish(engine, "new")
    assert engine.cached["new"] == 32 * 64, "two batches of sixteen"
    monkeypatch.undo()
    engine.tiers.orders += hung
    engine.run()


def test_two_requests_load_a_prefix_once() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(engine_of(secondary=secondary), "old", prompt)
    engine = engine_of(secondary=secondary, num_blocks=100)
    for name in "ab":
        engine.add(name, prompt, params(3))
    engine.run()
    assert engine.cached == {"a": 256, "b": 256}
    assert engine.tiers.counts["promote"] == engine.tiers.counts["load"] == 4


def test_a_preempted_request_asks_the_tiers_outside() -> None:
    engine = engine_of(secondary={}, num_blocks=200, preempt="recompute")
    prompt = prompt_of(300)
    engine.add("a", prompt, params(30))
    while engine.tiers.counts["write_back"] < 4:
        engine.step()
    request = engine.scheduler.requests["a"]
    engine.scheduler._preempt(request)
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.tiers.counts["promote"] == engine.tiers.counts["load"] == 4
    assert engine.outputs["a"] == expected_output(prompt, params(30), 0, LENGTH)


def test_what_could_not_be_kept_is_kept_later(monkeypatch: pytest.MonkeyPatch) -> None:
    secondary: Secondary = {}
    engine = engine_of(secondary=secondary)
    engine.tiers.fails = 1.0
    run_one(engine, "hot", prompt_of(300))
    assert not secondary
    engine.tiers.fails = 0.0
    now = time.monotonic() + PAUSE
    monkeypatch.setattr(engine.offload.jobs, "clock", lambda: now)
    run_one(engine, "other", prompt_of(100, 1))
    assert run_one(engine_of(secondary=secondary), "elsewhere", prompt_of(300)) == 256


@pytest.mark.parametrize("kind", ["store", "load"])
def test_copies_that_fail_are_errors_of_the_cpu_tier(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, do, prompt = engine_of(secondary={}, num_blocks=200), ToyTiers._do, prompt_of(300)
    cpu = engine.offload.stats["cpu"]

    def fails(tiers: ToyTiers, order: TransferOrder) -> TransferDone:
        done = do(tiers, order)
        return TransferDone(done.job, [False] * len(done.done)) if order.kind == kind else done

    run_one(engine, "works", prompt)
    assert cpu.errors_total == 0
    monkeypatch.setattr(ToyTiers, "_do", fails)
    engine.kv.pool.evict_free_blocks()
    run_one(engine, "again", prompt)
    run_one(engine, "other", prompt_of(300, 1))
    assert cpu.errors_total == 4


def test_chunks_for_which_there_is_no_slot_are_counted() -> None:
    """One step computes four of them, and both slots are pinned for the first two."""
    engine = engine_of(secondary={}, slots=2, budget=LENGTH)
    run_one(engine, "one", prompt_of(300))
    assert engine.offload.stats["cpu"].full_total == 2


def test_a_tier_that_hangs_keeps_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(secondary={})
    offload, carry_out = engine.offload, engine.tiers.carry_out

    def hung(*, all_of_it: bool = False) -> list[TransferDone]:
        keeps = [order for order in engine.tiers.orders if order.kind == "write_back"]
        engine.tiers.orders = [order for order in engine.tiers.orders if order not in keeps]
        done = carry_out(all_of_it=all_of_it)
        engine.tiers.orders += keeps
        return done

    monkeypatch.setattr(engine.tiers, "carry_out", hung)
    run_one(engine, "a", prompt_of(300))
    assert offload.has_pending_work and not offload.uses_device
    monkeypatch.undo()
    engine.run()
    assert not offload.has_pending_work


def test_aborted_while_its_blocks_are_on_their_way() -> None:
    secondary: Secondary = {}
    prompt = prompt_of(300)
    run_one(engine_of(secondary=secondary), "old", prompt)
    engine = engine_of(secondary=secondary)
    engine.add("new", prompt, params(3))
    while "load" not in {o.kind for o in engine.tiers.orders}:
        engine.step()
        engine.tiers.orders += engine.offload.take_orders()
    engine.scheduler.abort("new")
    assert engine.kv.pool.num_used, "what is being written stays pinned"
    engine.scheduler.check_integrity()
    run_one(engine, "next", prompt_of(300, 1))


@pytest.mark.parametrize("preempt", ["swap", "recompute", "auto"])
def test_preempted_requests_go_on(preempt: str) -> None:
    engine = engine_of(block_size=8, num_blocks=50, preempt=preempt, depth=2)
    for i in range(4):
        engine.add(str(i), prompt_of(80, i), params(120), arrival=i)
    engine.run()
    for i in range(4):
        assert engine.outputs[str(i)] == expected_output(prompt_of(80, i), params(120), 0, LENGTH)
    assert engine.scheduler.stats.preemptions_total
    computed = sum(plan.total_tokens for plan in engine.plans)
    if preempt == "swap":
        assert engine.tiers.counts["load"]
        assert computed < 4 * 200 + engine.scheduler.stats.preemptions_total * 100, "only what is no whole chunk is computed again"


def test_what_is_being_saved_preempts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take their time hold blocks that a request is to grow into: it waits for them."""
    engine = engine_of(block_size=8, num_blocks=60, preempt="recompute")
    for i in range(2):
        run_one(engine, f"before {i}", prompt_of(128, i))
    engine.add("alone", prompt_of(200, 5), params(180))
    monkeypatch.setattr(engine.tiers, "carry_out", lambda **_: [])
    for _ in range(100):
        engine.step()
    assert engine.kv.num_available < 8, "the device is full of what is being saved"
    monkeypatch.undo()
    engine.run()
    assert engine.outputs["alone"] == expected_output(prompt_of(200, 5), params(180), 0, LENGTH)
    assert engine.scheduler.stats.preemptions_total == 0


def test_a_fork_does_not_take_what_its_parent_still_loads() -> None:
    """The parent has lost its place meanwhile, and both are admitted in one step."""
    engine = engine_of(block_size=8, num_blocks=150, max_num_seqs=2, preempt="swap")
    prompt = prompt_of(190)
    for name, fork_of in (("x", None), ("a/0", None), ("a/1", "a/0")):
        engine.add(name, prompt_of(20, 1) if name == "x" else prompt, params(40), seed=int(name[-1] == "1"), fork_of=fork_of)
    for _ in range(8):
        engine.step()
    parent = engine.scheduler.requests["a/0"]
    assert parent.computed > 192 and not engine.scheduler.requests["a/1"].gates
    engine.offload.device.swap_out(parent)
    engine.scheduler._preempt(parent)
    engine._transfer()
    engine.kv.pool.evict_free_blocks()
    engine.scheduler.abort("x")
    engine.run()
    assert engine.tiers.counts["load"] >= 3
    for i in range(2):
        assert engine.outputs[f"a/{i}"] == expected_output(prompt, params(40), i, LENGTH)


@pytest.mark.parametrize("window", [40, 100, 200])
def test_a_window_larger_than_a_step_may_come_from_slots(window: int) -> None:
    """The device has the beginning, and the end of what slots have needs a whole window of its own."""
    secondary: Secondary = {}
    prompt = prompt_of(390)
    run_one(engine_of(secondary=secondary, window=window, num_blocks=200), "old", prompt, 2)
    engine = engine_of(secondary=secondary, window=window, num_blocks=60, block_size=16, budget=16)
    run_one(engine, "beginning", prompt[:200])
    assert run_one(engine, "all", prompt, 2) >= 320


@pytest.mark.parametrize("window", [0, 100])
def test_a_swapped_request_finds_its_chunks(window: int) -> None:
    engine = engine_of(block_size=8, num_blocks=120, window=window, preempt="swap")
    engine.add("a", prompt_of(220), params(40))
    for _ in range(8):
        engine.step()
    request = engine.scheduler.requests["a"]
    engine.offload.device.swap_out(request)
    engine.scheduler._preempt(request)
    engine._transfer()
    engine.kv.pool.evict_free_blocks()
    engine.run()
    assert engine.tiers.counts["load"] >= 3
    assert engine.outputs["a"] == expected_output(prompt_of(220), params(40), 0, LENGTH)


def pass_by_and_be_late(engine: ToyEngine, rng: random.Random) -> None:
    """Some requests pass the tiers outside by, some of these probe them, and now and then all that is asked is late."""
    offload, now = engine.offload, [0.0]
    offload.lookups.pays = lambda: rng.random() < 0.5
    offload.lookups.probe_is_due = lambda: rng.random() < 0.5

    def clock() -> float:
        now[0] += 3.1 if rng.random() < 0.01 else 0.0
        return now[0]

    offload.jobs.clock = clock


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_traffic(seed: int, data: st.DataObject) -> None:
    """Whatever moves when, and whatever fails, with drafts and masks: outputs are those without tiers, and all is given back."""
    rng = random.Random(seed)
    tokens = data.draw(st.integers(26, 80)) * 16
    state = data.draw(st.sampled_from([None, None, state_of(3), state_of(20)]))
    has_secondary, secondaries = data.draw(st.booleans()), dict[int, Secondary]()
    fields = {
        "state": state,
        "groups": [] if state is not None and data.draw(st.booleans()) else None,
        "window": data.draw(st.sampled_from([0, 0, 24, 100])),
        "budget": data.draw(st.sampled_from([24, 128])),
        "depth": data.draw(st.integers(1, 2)),
        "stages": data.draw(st.sampled_from([1, 1, 2])),
        "max_num_seqs": data.draw(st.integers(1, 6)),
        "slots": data.draw(st.integers(2, 40)),
        "preempt": data.draw(st.sampled_from(["auto", "swap", "recompute"])),
        "cpu_policy": data.draw(st.sampled_from(["lru", "arc"])),
        "policy": data.draw(st.sampled_from(["fcfs", "priority"])),
        "drafts": data.draw(st.sampled_from([0, 4])),
    }
    masked = data.draw(st.booleans())
    prefixes = [prompt_of(rng.randint(30, 250), i) for i in range(4)]
    for restart in range(data.draw(st.integers(1, 2))):
        block_size = data.draw(st.sampled_from([8, 16, 32]))
        num_blocks = tokens // block_size + (3 * state.num_blocks if state is not None else 0)
        # Snapshots are of use to engines of one layout alone, which find no objects of others.
        secondary = secondaries.setdefault(block_size if state is not None else 0, {}) if has_secondary else None
        engine = engine_of(**fields, block_size=block_size, num_blocks=num_blocks, rng=rng, secondary=secondary)
        engine.tiers.fails = data.draw(st.sampled_from([0.0, 0.0, 0.3]))
        if data.draw(st.booleans()):
            pass_by_and_be_late(engine, rng)
        wanted = {}
        for i in range(rng.randint(1, 14)):
            prompt = rng.choice(prefixes)[: rng.randint(1, 250)] + prompt_of(rng.randint(1, 60), rng.randint(0, 5))
            asked, name = params(rng.randint(1, 60)), f"{restart}/{i}"
            for copy in range(rng.choice([1, 1, 3])):
                own = f"{name}/{copy}"
                order = {"priority": rng.randint(0, 2), "arrival": float(i)}
                constraint = ToyConstraint(i, 60) if masked and rng.random() < 0.5 else None
                fork = f"{name}/0" if copy else None
                if engine.add(own, prompt, asked, constraint, seed=i + copy, fork_of=fork, **order) is None:
                    wanted[own] = (prompt, asked, i + copy, constraint)
            for _ in range(rng.randint(0, 6)):
                engine.step()
            if rng.random() < 0.1 and wanted:
                gone = rng.choice(list(wanted))
                engine.scheduler.abort(gone)
                wanted.pop(gone)
                engine.scheduler.check_integrity()
        engine.run()
        assert not engine.offload.promotions._lookups, "each has been counted"
        longest = min(LENGTH, engine.kv.max_tokens)
        for name, (prompt, asked, number, constraint) in wanted.items():
            assert engine.outputs[name] == expected_output(prompt, asked, number, longest, constraint)
