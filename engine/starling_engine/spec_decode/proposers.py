"""Ways to guess what follows a sequence from text that is there already, without a model."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from starling_engine.config import SpeculativeConfig
from starling_engine.request_state import RequestState
from starling_engine.spec_decode.token_index import SEPARATOR, Match, TokenIndex

SLICE = 2048
"""Tokens of a text that are indexed at once, in some 0.6 ms; the rest of a longer one comes with the next tokens."""
MOST_EARLIER = 1 << 20
"""Tokens of earlier outputs that are kept at most: about 200 MB."""
PREDICTION_WIDTH = 2
"""Fewest tokens of the output by which a place in a prediction is found again after the output has left it."""


class Proposer(Protocol):
    """Guesses for one request."""

    def propose(self, request: RequestState, most: int) -> list[int]:
        """Returns at most `most` tokens; empty where nothing is known."""
        ...


class FollowingIndex:
    """An index of a text that may grow, taken in by and by."""

    def __init__(self, width: int) -> None:
        self._index = TokenIndex(width)

    def matches(self, text: Sequence[int], tokens: Sequence[int], deepest: int) -> list[Match]:
        """Takes more of the text in, and finds places in it as `TokenIndex.matches` does."""
        self._index.extend(text[len(self._index) : len(self._index) + SLICE])
        return self._index.matches(tokens, deepest)


def repeated(tokens: Sequence[int], end: int, most: int) -> list[int]:
    """Returns what comes behind `end`; where the tokens stop, they repeat from there."""
    period = len(tokens) - end
    return [tokens[end + at % period] for at in range(most)]


class NgramProposer:
    """Prompt lookup: what came behind the latest of the longest places in the request's own tokens.

    https://github.com/apoorvumang/prompt-lookup-decoding
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._index = FollowingIndex(config.prompt_lookup_min)
        self._longest = config.prompt_lookup_max

    def propose(self, request: RequestState, most: int) -> list[int]:
        matches = self._index.matches(request.tokens, request.tokens, self._longest)
        return repeated(request.tokens, matches[0].end, most) if matches else []


class EarlierOutputs:
    """Outputs of requests that ended, in two indexes: when one is full, the older one goes."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._width = config.suffix_width
        self._most_outputs = config.suffix_decoding_max_cached_requests / 2
        self._outputs = 0
        """Outputs in the newer index."""
        self.indexes = [TokenIndex(self._width), TokenIndex(self._width)]

    def add(self, output: Sequence[int], salt: str) -> None:
        """Adds an output, for requests with the same cache salt: no tenant is to learn from its speed what another was answered."""
        if not self._most_outputs:
            return
        if self._outputs >= self._most_outputs or len(self.indexes[0]) + len(output) > MOST_EARLIER // 2:
            self.indexes = [TokenIndex(self._width), self.indexes[0]]
            self._outputs = 0
        self.indexes[0].extend(output[-MOST_EARLIER // 2 :], salt)
        self.indexes[0].extend([SEPARATOR], salt)
        self._outputs += 1


class SuffixProposer:
    """Suffix decoding: follows what most often came next, in the request's own tokens and in earlier outputs.

    The draft ends where no continuation is likely enough, and is no longer than `max_spec_factor` times the match: a long match is
    a good reason to go far. Oliaro et al., "SuffixDecoding" (https://arxiv.org/abs/2411.04975).
    """

    def __init__(self, config: SpeculativeConfig, earlier: EarlierOutputs) -> None:
        self._own = FollowingIndex(config.suffix_width)
        self._earlier = earlier
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob

    def propose(self, request: RequestState, most: int) -> list[int]:
        tokens = request.tokens
        found = [(tokens, match) for match in self._own.matches(tokens, tokens, self._depth)]
        for index in self._earlier.indexes:
            found += [(index.text, match) for match in index.matches(tokens, self._depth, request.record.cache_salt or "")]
        longest = max((match.length for _, match in found), default=0)
        places = [(text, match.end) for text, match in found if match.length == longest]
        return self._follow(places, min(most, int(self._factor * longest)))

    def _follow(self, places: "list[tuple[array[int], int]]", most: int) -> list[int]:
        """Returns the likeliest continuation of these places, as long as it is likely enough."""
        drafts: list[int] = []
        likelihood = 1.0
        while len(drafts) < most:
            places = [(text, end) for text, end in places if end < len(text) and text[end] != SEPARATOR]
            if not places:
                break
            following = [text[end] for text, end in places]
            token = max(following, key=following.count)
            likelihood *= following.count(token) / len(following)
            if likelihood < self._least:
                break
            drafts.append(token)
            places = [(text, end + 1) for text, end in places if text[end] == token]
        return drafts


class PredictionProposer:
    """OpenAI's `prediction`: the output is expected to be this text, with changes."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._text = prediction
        self._index = FollowingIndex(PREDICTION_WIDTH)
        self._at = 0
        """Index in the prediction behind which the output goes on."""
        self._seen = 0
        """Tokens of the output that were compared."""

    def propose(self, request: RequestState, most: int) -> list[int]:
        output, text = request.tokens[request.num_prompt :], self._text
        for token in output[self._seen :]:
            if self._at >= 0 and self._at < len(text) and text[self._at] == token:
                self._at += 1
            else:
                self._at = -1
        self._seen = len(output)
        if self._at < 0 and (matches := self._index.matches(text, output, len(output))):
            self._at = matches[-1].end
        return list(text[self._at : self._at + most]) if self._at >= 0 else []
