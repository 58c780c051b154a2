"""Where sequences end and part, and what the cache keeps for those who go on from there."""

import random
from collections.abc import Sequence

import pytest
from starling_engine.kv.prefix_ends import PrefixEnds
from starling_engine.kv.spec import KVGroup
from starling_engine.params import SamplingParams

from tests.engine.toy_engine import ToyEngine, expected_output, groups_of, state_of


def test_an_end_is_one_turns_until_a_second_sequence_goes_on_from_it() -> None:
    ends = PrefixEnds()
    ends.note(b"p", "prompt")
    ends.note(b"o", "output")
    ends.note(b"p", "output")
    assert [ends.meet(b"p"), ends.meet(b"o"), ends.meet(b"new")] == ["prompt", "output", "shared"]
    assert ends.shared([b"p", b"o", b"new"]) == [3]
    assert ends.meet(b"p") == "shared" and ends.is_shared(b"p") and not ends.is_shared(b"o")
    ends.note(b"p", "prompt")
    assert ends.is_shared(b"p"), "it stays so"


def test_the_oldest_ends_are_forgotten() -> None:
    ends = PrefixEnds(2)
    for name in (b"a", b"b", b"a", b"c"):
        ends.note(name, "output")
    assert ends.meet(b"a") == "output" and ends.meet(b"b") == "shared", "as if nobody had ended there"


def test_what_nearly_all_go_on_from_is_the_usual() -> None:
    ends = PrefixEnds()
    for kind in ("output", "prompt"):
        seen = []
        for number in range(60):
            ends.note(name := f"{kind} {number}".encode(), kind)
            ends.meet(name)
            seen.append(ends.usual)
        assert seen[0] != kind and None in seen and seen[-1] == kind


def tokens_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def ask(engine: ToyEngine, name: str, prompt: list[int], count: int = 12) -> list[int]:
    """Runs a request; returns its output, which is right whatever was found."""
    wanted = SamplingParams(max_tokens=count, ignore_eos=True)
    engine.add(name, prompt, wanted)
    engine.run()
    assert engine.outputs[name] == expected_output(prompt, wanted, 0, 256)
    return engine.outputs[name]


def talk(engine: ToyEngine, name: str, system: Sequence[int], turns: int, *, whole: bool) -> list[int]:
    """Runs the turns of a conversation. Unless they are `whole`, a turn leaves earlier answers out but for their last tokens."""
    text = list(system)
    for turn in range(turns):
        text += tokens_of(10, 100 * ord(name) + turn)
        output = ask(engine, f"{name}{turn}", list(text))
        text += output if whole else output[-3:]
    return text


@pytest.mark.parametrize("whole", [True, False], ids=["behind outputs", "behind prompts"])
@pytest.mark.parametrize("kind", ["state", "state alone", "window"])
def test_the_last_turn_of_conversations_stays_when_others_need_room(kind: str, *, whole: bool) -> None:
    """Three talk in turns, with room for what they will go on from, and not for what their earlier turns left."""
    groups: list[KVGroup] | None = {"state": groups_of(8), "state alone": [], "window": groups_of(8, 24)}[kind]
    num_blocks = {"state": 110, "state alone": 50, "window": 74}[kind]
    engine = ToyEngine(state=None if kind == "window" else state_of(6), groups=groups, num_blocks=num_blocks, max_model_len=256)
    system = tokens_of(40, 0)
    texts = {name: talk(engine, name, system, 5, whole=whole) for name in "abc"}
    for name, text in texts.items():
        ask(engine, f"{name} last", text + tokens_of(10, 7))
    lost = {name: len(text) - engine.cached[f"{name} last"] for name, text in texts.items()}
    assert max(lost.values()) <= (12 if whole else 3) + 24, lost
    ask(engine, "new", system + tokens_of(20, 8))
    assert engine.cached["new"] == 40, "their beginning is there for one more"


def test_the_snapshot_of_a_long_text_outlives_those_of_short_ones() -> None:
    """There is room for a state and four snapshots. That of the long text is used least recently, but spares ten times as much."""
    engine = ToyEngine(state=state_of(6), groups=[], num_blocks=1 + 5 * 6, max_model_len=256)
    long = tokens_of(200, 1)
    ask(engine, "long", long, 2)
    for number in range(6):
        ask(engine, f"short {number}", tokens_of(20, 10 + number), 2)
    ask(engine, "again", long, 2)
    assert engine.cached["again"] == 192
    for number in range(40):
        ask(engine, f"next {number}", tokens_of(20, 100 + number), 2)
    ask(engine, "late", long, 2)
    assert engine.cached["late"] == 0, "it does not stay for ever"


def test_a_text_that_loses_its_end_is_found_up_to_an_earlier_snapshot() -> None:
    """The last snapshot goes before the keys and values that it needs, and these before the snapshot of the first prompt."""
    engine = ToyEngine(state=state_of(1), groups=groups_of(8), num_blocks=60, max_model_len=256)
    text = tokens_of(100, 1)
    for _ in range(2):
        text += ask(engine, f"after {len(text)}", list(text), 70)
    ask(engine, "other", tokens_of(230, 10), 2)
    ask(engine, "again", text, 2)
    assert engine.cached["again"] == 96


def test_equal_requests_at_once_have_one_snapshot() -> None:
    """The second one's snapshot in the output is there already, and none to spend, though all go on behind prompts."""
    engine = ToyEngine(state=state_of(3), num_blocks=300, max_model_len=256)
    for name in "abc":
        talk(engine, name, tokens_of(20, ord(name)), 9, whole=False)
    prompt, wanted = tokens_of(20, 1), SamplingParams(max_tokens=30, ignore_eos=True)
    for name in ("one", "other"):
        engine.add(name, prompt, wanted)
    engine.run()
    assert engine.outputs["one"] == engine.outputs["other"] == expected_output(prompt, wanted, 0, 256)
