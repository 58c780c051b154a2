"""Guesses from text: each proposer against a search that is written out."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starling_engine.config import SpeculativeConfig
from starling_engine.kv.hashing import HashChain
from starling_engine.kv.manager import SequenceBlocks
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.request_state import RequestState
from starling_engine.spec_decode import proposers
from starling_engine.spec_decode.proposers import EarlierOutputs, NgramProposer, PredictionProposer, SuffixProposer
from starling_engine.spec_decode.token_index import MOST_PLACES, SEPARATOR, TokenIndex

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def request_of(prompt: Sequence[int], output: Sequence[int] = (), **fields: object) -> RequestState:
    record = EngineRequest(id="a", prompt_ids=prompt, params=SamplingParams(), **fields)
    request = RequestState(record, SequenceBlocks([[]], HashChain(b"", 8)), 1000, ())
    request.tokens.extend(output)
    return request


def longest_match(text: Sequence[int], tail: Sequence[int], end: int, deepest: int) -> int:
    length = 0
    while length < min(deepest, end, len(tail)) and text[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length


@given(TOKENS, TOKENS, st.integers(1, 3), st.integers(3, 8))
def test_an_index_finds_the_longest_of_the_latest_places(text: list[int], tail: list[int], width: int, deepest: int) -> None:
    index = TokenIndex(width)
    for at in range(0, len(text), 7):
        index.extend(text[at : at + 7])
    lengths = {end: longest_match(text, tail, end, deepest) for end in range(1, len(text) + 1)}
    latest = [end for end in sorted(lengths, reverse=True) if lengths[end] >= width][:MOST_PLACES]
    usable = [end for end in latest if end < len(text)]
    best = max((lengths[end] for end in usable), default=0)
    found = index.matches(tail, deepest)
    assert [(match.end, match.length) for match in found] == [(end, best) for end in usable if lengths[end] == best]


def test_no_match_goes_across_the_end_of_a_text_or_into_another_scope() -> None:
    index = TokenIndex(2)
    index.extend([1, 2, 3, SEPARATOR], "mine")
    index.extend([1, 2, 9, SEPARATOR], "theirs")
    assert [index.text[match.end] for match in index.matches([1, 2], 4, "mine")] == [3]
    assert [index.text[match.end] for match in index.matches([1, 2], 4, "theirs")] == [9]
    assert index.matches([2, 3], 4, "mine") == [] and index.matches([1, 2], 4) == []


def test_prompt_lookup_takes_what_followed_the_latest_of_the_longest_places() -> None:
    proposer = NgramProposer(SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3))
    assert proposer.propose(request_of([7, 1, 2, 3, 4, 8, 2, 3, 5, 9, 1, 2, 3]), 2) == [4, 8]
    proposer = NgramProposer(SpeculativeConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=2))
    assert proposer.propose(request_of([7, 1, 2, 3, 4, 8, 2, 3, 5, 9, 1, 2, 3]), 2) == [5, 9]
    assert NgramProposer(SpeculativeConfig()).propose(request_of([1, 2, 3]), 4) == [], "nothing comes twice"


def test_what_repeats_goes_on_repeating() -> None:
    proposer = NgramProposer(SpeculativeConfig(method="ngram"))
    request = request_of([5, 1, 2, 3, 1, 2, 3])
    assert proposer.propose(request, 7) == [1, 2, 3, 1, 2, 3, 1]
    request.tokens.extend([1, 2])
    assert proposer.propose(request, 2) == [3, 1]


def test_a_long_prompt_is_indexed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "SLICE", 4)
    proposer, request = NgramProposer(SpeculativeConfig(method="ngram")), request_of([9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 1, 2])
    assert [proposer.propose(request, 1) for _ in range(3)] == [[], [3], [3]]


def test_a_prediction_is_followed_before_all_of_it_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "SLICE", 4)
    proposer, request = PredictionProposer(range(100, 120)), request_of([1])
    assert proposer.propose(request, 3) == [100, 101, 102], "what it begins with needs no index"
    request.tokens.extend([7, 110, 111])
    assert [proposer.propose(request, 2) for _ in range(4)] == [[], [], [], [112, 113]]


def suffix(earlier: EarlierOutputs | None = None, **settings: object) -> SuffixProposer:
    config = SpeculativeConfig(method="suffix", **settings)
    return SuffixProposer(config, earlier or EarlierOutputs(config))


def test_suffix_decoding_follows_what_most_often_came_next() -> None:
    request = request_of([1, 2, 3, 4, 8, 1, 2, 3, 5, 8, 1, 2, 3, 5, 7, 1, 2])
    assert suffix(suffix_decoding_max_spec_factor=9.0).propose(request, 3) == [3, 5, 7], "of 8 and 7 the latest"
    assert suffix().propose(request, 9) == [3, 5], "no longer than the match"
    assert suffix(suffix_decoding_max_spec_factor=9.0, suffix_decoding_min_token_prob=0.7).propose(request, 9) == [3]


def test_suffix_decoding_remembers_outputs_of_the_same_salt() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=2.0)
    earlier = EarlierOutputs(config)
    earlier.add([4, 5, 6, 7, 8], "mine")
    assert SuffixProposer(config, earlier).propose(request_of([1, 4, 5], cache_salt="mine"), 9) == [6, 7, 8]
    assert SuffixProposer(config, earlier).propose(request_of([1, 4, 5], cache_salt="theirs"), 9) == []


@pytest.mark.parametrize("most", [2, 10_000])
def test_earlier_outputs_take_bounded_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "MOST_EARLIER", 1000)
    earlier = EarlierOutputs(SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=most))
    rng = random.Random(0)
    for _ in range(200):
        earlier.add(rng.choices(range(50), k=rng.randint(1, 1500)), "")
        assert sum(map(len, earlier.indexes)) <= 1000 + 2
        assert sum(index.text.count(SEPARATOR) for index in earlier.indexes) <= most


def test_no_output_is_kept_where_none_is_wanted() -> None:
    earlier = EarlierOutputs(SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=0))
    earlier.add([1, 2, 3], "")
    assert not any(map(len, earlier.indexes))


def test_a_prediction_is_followed_and_found_again_after_a_change() -> None:
    proposer, request = PredictionProposer([1, 2, 3, 4, 5, 6, 7, 8]), request_of([9])
    assert proposer.propose(request, 3) == [1, 2, 3]
    request.tokens.extend([1, 2])
    assert proposer.propose(request, 3) == [3, 4, 5]
    request.tokens.extend([30])
    assert proposer.propose(request, 3) == [], "the output has left it"
    request.tokens.extend([31, 5, 6])
    assert proposer.propose(request, 9) == [7, 8]
    request.tokens.extend([7, 8])
    assert proposer.propose(request, 9) == [], "it is at its end"
