"""Beam search over an engine that only knows sampling.

Each step requests the likeliest next tokens of every beam. The beams' prefixes come from the prefix cache, so a step costs one
token a beam. Results equal those of transformers' beam search with `early_stopping="never"`.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from starling_engine.errors import InvalidRequest
from starling_engine.params import MAX_LOGPROBS, BeamSearchParams

Expand = Callable[[list[list[int]], int], Awaitable[list[dict[int, float]]]]
"""Function (prefixes, count) -> for each prefix the `count` likeliest next tokens with their log probabilities."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A result. `tokens` and `text` begin with the prompt's, as vLLM's do; `cum_logprob` is of the tokens after it alone."""

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens after the prompt, with the sum of their log probabilities."""

    tokens: tuple[int, ...]
    cum_logprob: float
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        """Returns equation 14 of https://arxiv.org/abs/1609.08144, in the simpler form of transformers and vLLM."""
        return self.cum_logprob / _power(max(1, len(self.tokens)), length_penalty)


def validate(params: BeamSearchParams, num_eos: int) -> None:
    """Raises InvalidRequest for parameters that are impossible with `num_eos` end-of-sequence tokens."""
    if params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {params.max_tokens}", "max_tokens")
    # All end-of-sequence tokens may be among a beam's likeliest; then as many others are requested.
    max_width = MAX_LOGPROBS - (0 if params.ignore_eos else num_eos)
    if not 1 <= params.beam_width <= max_width:
        raise InvalidRequest(f"beam_width must be in [1, {max_width}], got {params.beam_width}", "beam_width")


async def beam_search(
    prompt_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Collection[int], expand: Expand
) -> list[Beam]:
    """Returns the `beam_width` beams with the best scores, best first; fewer only if the vocabulary gives no more."""
    eos = () if params.ignore_eos else eos_token_ids
    running, finished = [Beam((), 0.0)], list[Beam]()
    for _ in range(params.max_tokens):
        prefixes = [[*prompt_ids, *beam.tokens] for beam in running]
        likeliest = await expand(prefixes, params.beam_width + len(eos))
        running, ended = _advance(running, likeliest, eos, params.beam_width)
        finished = _best([*finished, *ended], params)
        if _is_done(running, finished, params):
            return finished
    return _best([*finished, *running], params)


def _advance(
    beams: Sequence[Beam], likeliest: Sequence[dict[int, float]], eos: Collection[int], width: int
) -> tuple[list[Beam], list[Beam]]:
    """Adds a token to each beam; returns those that go on and those that ended. To end, a beam must be among the `width` best."""
    candidates = [
        Beam((*beam.tokens, token), beam.cum_logprob + logprob, ended=token in eos)
        for beam, row in zip(beams, likeliest, strict=True)
        for token, logprob in row.items()
    ]
    candidates.sort(key=lambda beam: -beam.cum_logprob)
    running = [beam for beam in candidates if not beam.ended]
    return running[:width], [beam for beam in candidates[:width] if beam.ended]


def _is_done(running: Sequence[Beam], finished: Sequence[Beam], params: BeamSearchParams) -> bool:
    """Returns whether no running beam can still enter the best: its log probability never grows."""
    if not running:
        return True
    if len(finished) < params.beam_width:
        return False
    longer_is_better = params.length_penalty > 0
    length = params.max_tokens if longer_is_better else len(running[0].tokens) + 1
    best_possible = running[0].cum_logprob / _power(length, params.length_penalty)
    return best_possible <= finished[-1].score(params.length_penalty)


def _best(beams: Iterable[Beam], params: BeamSearchParams) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]


def _power(length: int, exponent: float) -> float:
    return math.exp(exponent * math.log(length))
