"""Recurrent state: what is found again of it. The toy worker checks the state with which each row begins."""

import random

import pytest
from starling_engine.kv.manager import KVManager
from starling_engine.kv.seen_blocks import SeenBlocks
from starling_engine.kv.snapshots import SnapshotSpacing, prompt_stops
from starling_engine.kv.spec import KVGroup
from starling_engine.params import SamplingParams

from tests.engine.toy_engine import ToyEngine, expected_output, state_of


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def ask(engine: ToyEngine, name: str, prompt: list[int], count: int = 4) -> int:
    """Runs a request; returns how many tokens of its prompt were found."""
    wanted = SamplingParams(max_tokens=count, ignore_eos=True)
    assert engine.add(name, prompt, wanted) is None
    engine.run()
    assert engine.outputs[name] == expected_output(prompt, wanted, 0, 128)
    return engine.cached[name]


ALONE = pytest.mark.parametrize("groups", [None, []], ids=["beside keys and values", "alone"])


@ALONE
@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_begins_at_the_last_snapshot_of_the_output(depth: int, groups: list[KVGroup] | None) -> None:
    engine = ToyEngine(state=state_of(3), depth=depth, groups=groups)
    prompt = prompt_of(20)
    assert ask(engine, "a", prompt, 15) == 0
    turn = prompt + engine.outputs["a"] + prompt_of(10, 1)
    assert ask(engine, "b", turn) == 32, "a state at 32 of 35 tokens; the prompt's was at 16"
    assert ask(engine, "c", prompt) == 16, "that of the prompt is there still"
    assert ask(engine, "d", turn[:34]) == 32


@ALONE
@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_meet_the_snapshots_of_an_output(depth: int, groups: list[KVGroup] | None) -> None:
    """Rows of up to five tokens begin at each eighth one. With steps in flight, that row waits for what was accepted before it."""
    engine = ToyEngine(state=state_of(3), depth=depth, groups=groups, drafts=4, rng=random.Random(1))
    prompt = prompt_of(20)
    assert ask(engine, "a", prompt, 60) == 0
    assert sum(len(plan.copies) for plan in engine.plans) == 3 * (1 + 7), "of the prompt at 16, of the output at 24, 32, ..., 72"
    assert len(engine.plans) < 50, "some drafts are accepted"
    assert ask(engine, "b", prompt + engine.outputs["a"]) == 72, "a state at 72 of 79 tokens"


@ALONE
def test_prompts_with_a_common_beginning_meet_where_it_ends(groups: list[KVGroup] | None) -> None:
    engine = ToyEngine(state=state_of(3), groups=groups)
    common = prompt_of(40)
    found = [ask(engine, str(i), common + prompt_of(20, i + 1), 2) for i in range(3)]
    assert found == [0, 24, 40], "the second one finds that of a long prompt, and leaves one where the first was left"


def test_a_state_takes_the_snapshots_place_where_there_is_no_room_for_both() -> None:
    engine = ToyEngine(state=state_of(6), num_blocks=1 + 6 + 6, max_model_len=48)
    prompt = prompt_of(33)
    assert ask(engine, "a", prompt, 2) == 0
    assert ask(engine, "b", prompt, 2) in (0, 32), "whatever there is room for"
    assert ask(engine, "c", prompt, 8) in (0, 32)


@ALONE
def test_snapshots_of_failed_rows_are_forgotten(groups: list[KVGroup] | None) -> None:
    engine = ToyEngine(state=state_of(3), groups=groups)
    prompt = prompt_of(40)
    engine.worker.broken = {prompt[0]}
    engine.add("a", prompt, SamplingParams(max_tokens=4))
    engine.run()
    engine.worker.broken = set()
    assert engine.finished["a"].finish_reason == "error"
    assert ask(engine, "b", prompt) == 0


@ALONE
def test_without_a_prefix_cache_there_are_none(groups: list[KVGroup] | None) -> None:
    engine = ToyEngine(state=state_of(3), prefix_caching=False, groups=groups)
    for name in "ab":
        assert ask(engine, name, prompt_of(40), 20) == 0
    assert not any(plan.copies for plan in engine.plans)


def test_preempted_requests_go_on_from_snapshots() -> None:
    engine = ToyEngine(state=state_of(2), num_blocks=25, budget=16, max_num_seqs=4)
    for i in range(4):
        engine.add(str(i), prompt_of(20, i), SamplingParams(max_tokens=40, ignore_eos=True), seed=i)
    engine.run()
    assert engine.scheduler.stats.preemptions_total > 0
    for i in range(4):
        assert engine.outputs[str(i)] == expected_output(prompt_of(20, i), SamplingParams(max_tokens=40), i, 128)


def test_a_state_alone_has_room_for_any_number_of_tokens() -> None:
    """Two states fit: of five requests three wait, none is preempted, and lengths do not matter."""
    engine = ToyEngine(state=state_of(4), groups=[], num_blocks=1 + 2 * 4, max_num_seqs=5)
    for i in range(5):
        engine.add(str(i), prompt_of(20, i), SamplingParams(max_tokens=90, ignore_eos=True), seed=i)
    engine.run()
    assert max(len(plan.slots) for plan in engine.plans) == 2 and engine.scheduler.stats.preemptions_total == 0
    for i in range(5):
        assert engine.outputs[str(i)] == expected_output(prompt_of(20, i), SamplingParams(max_tokens=90), i, 128)


def test_blocks_of_a_state_alone_are_counted_by_the_tokens_that_they_stand_for() -> None:
    """Routers take vllm:cache_config_info for the tokens that there is room for."""
    engine = ToyEngine(state=state_of(4), groups=[], num_blocks=1 + 5 * 4 + 3, max_model_len=100)
    assert engine.scheduler.snapshot().kv_token_blocks == 5 * 13, "five states, and a sequence has 13 blocks of 8 tokens at most"
    hybrid = ToyEngine(state=state_of(4), num_blocks=24)
    assert hybrid.scheduler.snapshot().kv_token_blocks == hybrid.scheduler.snapshot().kv_blocks == 23


def test_the_names_of_the_last_blocks_are_kept() -> None:
    seen, names = SeenBlocks(4), [bytes([n]) for n in range(6)]
    seen.add(names[:4])
    assert seen.num_leading(names) == 4
    seen.add(names[:2])
    assert seen.version == 4, "nothing was new"
    seen.add(names[4:])
    assert seen.version == 6
    assert [seen.num_leading(names[first:]) for first in (0, 2, 4)] == [2, 0, 2], "those that were not seen again are forgotten"


def test_names_that_are_looked_up_are_kept_the_first_ones_longest() -> None:
    seen, names = SeenBlocks(4), [bytes([n]) for n in range(8)]
    seen.add(names[:4])
    assert seen.num_leading(names[:2]) == 2
    seen.add(names[4:6])
    assert seen.num_leading(names[:2]) == 2, "the others were forgotten"
    seen.add(names[6:])
    assert seen.num_leading(names[:1]) == 1


def test_a_search_is_made_again_when_others_have_computed_the_beginning() -> None:
    """The first prompt has no snapshot yet, when its first steps let the second one know how much they share."""
    engine = ToyEngine(state=state_of(3), groups=[], prefix_caching=True)
    kv, prompt = engine.kv, prompt_of(64)
    first, second = (kv.new_sequence(b"") for _ in range(2))
    kv.find_prefix(second, prompt)
    assert second.junction == 0 and kv.admit(first, [], len(prompt))
    kv.cache_blocks(first, prompt, 32)
    kv.find_prefix(second, prompt)
    assert second.junction == 32


def test_prompts_stop_seldom() -> None:
    spacing = SnapshotSpacing(prompt=1000, output=64, least=256)

    def stops(start: int, length: int, junction: int = 0) -> list[int]:
        return prompt_stops(start, length, junction, 16, spacing)

    assert stops(0, 200) == []
    assert stops(0, 273) == [272], "the last token is computed in any case"
    assert stops(0, 272) == [256]
    assert stops(0, 2500) == [1008, 2016, 2496]
    assert stops(0, 2100, 512) == [512, 1008, 2016]
    assert stops(1984, 2100) == []


def test_a_snapshot_from_a_tier_is_worth_its_length_where_its_request_ends_before_a_step() -> None:
    kv = KVManager([], 13, state=state_of(3))
    names = []
    for number, length in enumerate((192, 16)):
        sequence, tokens = kv.new_sequence(bytes([number])), prompt_of(length + 8, number)
        kv.find_prefix(sequence, tokens)
        assert kv.admit(sequence, [], len(tokens), external=length)
        kv.cache_external_state(sequence, tokens, length)
        names.append(sequence.chain.hashes[length // 8 - 1])
        kv.release(sequence)
    assert all(map(kv.find_snapshot, names))
    kv.pool.take(kv.pool.num_blank + 3)
    assert [kv.find_snapshot(name) is not None for name in names] == [True, False], "the short one goes, though it came later"
