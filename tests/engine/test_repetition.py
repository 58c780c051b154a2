"""A request may end when its output repeats itself, wherever its tokens come from."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starling_engine.errors import InvalidRequest
from starling_engine.params import RepetitionDetectionParams, SamplingParams
from starling_engine.repetition import RepetitionDetector

from tests.engine.toy_engine import ToyEngine, expected_output, repeats

WRONG_TYPE: dict[str, Any] = {"max_pattern_size": 2.5, "min_count": 2}

DETECTIONS = st.builds(
    lambda longest, shortest, count: RepetitionDetectionParams(longest, min(shortest, longest), count),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(2, 4),
)


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Patterns of few tokens, some of them several times, so that many repeat and many nearly do."""
    pieces = draw(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(1, 5)), max_size=6))
    return [token for pattern, count in pieces for token in pattern * count]


@given(DETECTIONS, outputs())
def test_a_repetition_is_found_at_each_token_where_there_is_one(wanted: RepetitionDetectionParams, output: list[int]) -> None:
    detector = RepetitionDetector(wanted, [])
    found = [detector.advance(token) for token in output]
    assert found == [repeats(output[:length], wanted) for length in range(1, len(output) + 1)]


@given(DETECTIONS, outputs(), st.data())
def test_what_counts_are_the_tokens_not_how_they_came(
    wanted: RepetitionDetectionParams, output: list[int], data: st.DataObject
) -> None:
    before = data.draw(st.integers(0, len(output)))
    whole, continued = RepetitionDetector(wanted, []), RepetitionDetector(wanted, output[:before])
    assert [whole.advance(token) for token in output][before:] == [continued.advance(token) for token in output[before:]]


def test_what_is_remembered_is_bounded() -> None:
    rng = random.Random(0)
    detector = RepetitionDetector(RepetitionDetectionParams(8, 1, 100), (rng.randrange(3) for _ in range(5000)))
    assert len(detector._recent) == sum(map(len, detector._places.values())) == 8
    assert len(detector._missing) <= 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 4])
def test_the_request_ends_at_the_token_that_completes_it(depth: int, drafts: int) -> None:
    wanted = RepetitionDetectionParams(3, 1, 2)
    prompts = [random.Random(seed).choices(range(50), k=9) for seed in range(12)]
    params = SamplingParams(max_tokens=60, repetition_detection=wanted)
    engine = ToyEngine(depth=depth, drafts=drafts, num_blocks=24, rng=random.Random(1))
    for seed, prompt in enumerate(prompts):
        engine.add(str(seed), prompt, params, seed=seed)
    engine.run()
    reasons = []
    for seed, prompt in enumerate(prompts):
        assert engine.outputs[str(seed)] == expected_output(prompt, params, seed, 128)
        reasons.append(engine.finished[str(seed)].finish_reason)
        assert reasons[-1] == ("repetition" if repeats(engine.outputs[str(seed)], wanted) else "length")
    assert set(reasons) == {"repetition", "length"}, "or this shows less than it says"
    assert engine.scheduler.stats.preemptions_total > 0


def test_another_core_ends_it_where_the_first_would_have() -> None:
    params = SamplingParams(max_tokens=60, repetition_detection=RepetitionDetectionParams(3, 1, 2))
    prompt, seed, output = next(
        (prompt, seed, output)
        for seed in range(100)
        if 10 < len(output := expected_output(prompt := random.Random(seed).choices(range(50), k=9), params, seed, 128)) < 60
    )
    for before in range(len(output)):
        engine = ToyEngine()
        engine.add("a", prompt, params, seed=seed, attempt=1, output_ids=output[:before])
        engine.run()
        assert engine.outputs["a"] == output[before:]
        assert engine.finished["a"].finish_reason == "repetition"


def test_it_does_not_end_below_min_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.toy_engine.token_after", lambda *_: 7)
    wanted = RepetitionDetectionParams(1, 1, 2)
    for min_tokens, length in ((0, 2), (2, 2), (9, 9)):
        engine = ToyEngine()
        engine.add("a", [1, 2, 3], SamplingParams(max_tokens=60, repetition_detection=wanted, min_tokens=min_tokens))
        engine.run()
        assert engine.outputs["a"] == [7] * length


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (RepetitionDetectionParams(max_pattern_size=-1), "repetition_detection.max_pattern_size"),
        (RepetitionDetectionParams(max_pattern_size=1025, min_count=2), "repetition_detection.max_pattern_size"),
        (RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=4, min_count=2), "repetition_detection.min_pattern_size"),
        (RepetitionDetectionParams(min_pattern_size=1), "repetition_detection.min_pattern_size"),
        (RepetitionDetectionParams(max_pattern_size=3), "repetition_detection.min_count"),
        (RepetitionDetectionParams(max_pattern_size=3, min_count=1), "repetition_detection.min_count"),
        (RepetitionDetectionParams(max_pattern_size=3, min_count=1001), "repetition_detection.min_count"),
        (RepetitionDetectionParams(**WRONG_TYPE), "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 3, "min_count": 2}, "repetition_detection"),
    ],
)
def test_wrong_parameters_are_refused(wanted: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(repetition_detection=wanted).validate(100)
    assert error.value.param == param


def test_no_pattern_means_no_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.toy_engine.token_after", lambda *_: 7)
    SamplingParams(repetition_detection=RepetitionDetectionParams()).validate(100)
    engine = ToyEngine()
    engine.add("a", [1], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetectionParams()))
    engine.run()
    assert engine.finished["a"].finish_reason == "length"
