"""Beam search against a fake model small enough to try every sequence."""

import itertools
import math
import random
from typing import Any

import pytest
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.beam import Beam, beam_search
from starling_engine.outputs import Logprob, TokenLogprobs
from starling_engine.params import BeamSearchParams

WRONG_TYPE: dict[str, Any] = {"beam_width": "2", "max_tokens": 1}

EOS = 9


class TableModel:
    """Next-token probabilities by prefix; unlisted prefixes end."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]]) -> None:
        self.table = table
        self.asked: list[list[list[int]]] = []

    async def __call__(self, prefixes: list[list[int]], count: int) -> list[TokenLogprobs]:
        self.asked.append(prefixes)
        return [self.likeliest(tuple(prefix), count) for prefix in prefixes]

    def likeliest(self, prefix: tuple[int, ...], count: int) -> TokenLogprobs:
        row = self.table.get(prefix, {EOS: 1.0})
        likeliest = sorted(row.items(), key=lambda item: -item[1])[:count]
        return {token: Logprob(math.log(p), rank) for rank, (token, p) in enumerate(likeliest, start=1)}


# Greedy takes 1 (0.5) and then can get 0.2 at best; 2 (0.4) leads to 0.9.
GARDEN_PATH = TableModel({(0,): {1: 0.5, 2: 0.4, 3: 0.1}, (0, 1): {4: 0.4, 5: 0.35, 6: 0.25}, (0, 2): {4: 0.9, 5: 0.1}})


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (1, [((1, 4), 0.2)]),
        (2, [((2, 4), 0.36), ((1, 4), 0.2)]),
        (3, [((2, 4), 0.36), ((1, 4), 0.2), ((1, 5), 0.175)]),
    ],
)
async def test_finds_what_greedy_misses(width: int, expected: list[tuple[tuple[int, ...], float]]) -> None:
    beams = await beam_search([0], BeamSearchParams(beam_width=width, max_tokens=2), {EOS}, GARDEN_PATH)
    assert [beam.tokens for beam in beams] == [tokens for tokens, _ in expected]
    assert [math.exp(beam.cum_logprob) for beam in beams] == pytest.approx([p for _, p in expected])
    assert not any(beam.ended for beam in beams)


SHORT_OR_LONG = {(): {EOS: 0.3, 1: 0.7}, (1,): {1: 0.6, EOS: 0.4}, (1, 1): {EOS: 0.9, 1: 0.1}}


@pytest.mark.parametrize(
    ("length_penalty", "best"),
    [(-1.0, (EOS,)), (0.0, (1, 1, EOS)), (1.0, (1, 1, EOS)), (5.0, (1, 1, EOS))],
)
async def test_length_penalty(length_penalty: float, best: tuple[int, ...]) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=length_penalty)
    beams = await beam_search([], params, {EOS}, TableModel(SHORT_OR_LONG))
    assert beams[0].tokens == best
    assert beams[0].ended
    scores = [beam.score(length_penalty) for beam in beams]
    assert scores == sorted(scores, reverse=True)


async def test_finished_beams_stay_and_run_no_further() -> None:
    model = TableModel({(): {EOS: 0.6, 1: 0.4}, (1,): {1: 0.5, 2: 0.5}})
    beams = await beam_search([], BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=0), {EOS}, model)
    assert beams[0] == Beam((EOS,), math.log(0.6), ended=True)
    assert len(beams) == 2
    assert all(EOS not in prefix for prefixes in model.asked for prefix in prefixes)


async def test_ignore_eos_goes_on() -> None:
    model = TableModel({(): {EOS: 0.6, 1: 0.4}, (EOS,): {1: 1.0}, (1,): {1: 1.0}})
    params = BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True)
    assert [beam.tokens for beam in await beam_search([], params, {EOS}, model)] == [(EOS, 1)]


async def test_stops_when_no_beam_can_get_better() -> None:
    unlikely = {(1,) * n: {1: 0.5, 2: 0.5} for n in range(1, 50)}
    model = TableModel({(): {EOS: 0.99, 1: 0.01}} | unlikely)
    params = BeamSearchParams(beam_width=1, max_tokens=50, length_penalty=0.0)
    assert [beam.tokens for beam in await beam_search([], params, {EOS}, model)] == [(EOS,)]
    assert len(model.asked) == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
async def test_a_beam_as_wide_as_the_tree_finds_the_best_sequences(seed: int, length_penalty: float) -> None:
    rng = random.Random(seed)
    vocab, depth, ends = [0, 1, 8, 9], 3, {8, 9}
    table = {}
    for length in range(depth):
        for prefix in itertools.product([0, 1], repeat=length):
            weights = [rng.random() ** 3 for _ in vocab]
            table[prefix] = {token: weight / sum(weights) for token, weight in zip(vocab, weights, strict=True)}
    params = BeamSearchParams(beam_width=18, max_tokens=depth, length_penalty=length_penalty)
    beams = await beam_search([], params, ends, TableModel(table))
    everything = []
    for length in range(1, depth + 1):
        for head in itertools.product([0, 1], repeat=length - 1):
            for last in vocab if length == depth else ends:
                tokens = (*head, last)
                cum = sum(math.log(table[tokens[:i]][token]) for i, token in enumerate(tokens))
                everything.append(Beam(tokens, cum, last in ends))
    everything.sort(key=lambda beam: -beam.score(length_penalty))
    assert [beam.tokens for beam in beams] == [beam.tokens for beam in everything[:18]]


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        (BeamSearchParams(beam_width=0, max_tokens=1), "beam_width", r"in \[1, 18\], got 0"),
        (BeamSearchParams(beam_width=19, max_tokens=1), "beam_width", r"in \[1, 18\], got 19"),
        (BeamSearchParams(beam_width=21, max_tokens=1, ignore_eos=True), "beam_width", r"in \[1, 20\]"),
        (BeamSearchParams(beam_width=1, max_tokens=0), "max_tokens", r"must be in \[1, "),
        (BeamSearchParams(beam_width=1, max_tokens=1, logprobs=21), "logprobs", r"in \[0, 20\], got 21"),
        (BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=math.inf), "length_penalty", r"in \[-20, 20\], got inf"),
        (BeamSearchParams(beam_width=1, max_tokens=1, temperature=0.5), "temperature", "must be 0 or 1, got 0.5"),
        (BeamSearchParams(**WRONG_TYPE), "beam_width", "Expected `int`"),
    ],
)
def test_refuses(params: BeamSearchParams, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        params.validate(num_eos=2)
    assert caught.value.param == param


async def test_log_probabilities_of_each_token_are_listed_if_wanted() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=2, logprobs=1)
    beams = await beam_search([0], params, {EOS}, GARDEN_PATH)
    assert [[list(row) for row in beam.logprobs] for beam in beams] == [[[2, 1], [4]], [[1], [4]], [[1], [5, 4]]]
    for beam in beams:
        chosen = [row[token].logprob for row, token in zip(beam.logprobs, beam.tokens, strict=True)]
        assert sum(chosen) == pytest.approx(beam.cum_logprob)
    unasked = await beam_search([0], BeamSearchParams(beam_width=3, max_tokens=2), {EOS}, GARDEN_PATH)
    assert unasked == beams and not any(beam.logprobs for beam in unasked)
