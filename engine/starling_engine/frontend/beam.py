"""Beam search over an engine that only knows sampling.

Each step requests the likeliest next tokens of every beam (`beam_requests.py`). Results equal those of transformers' beam search
with `early_stopping="never"`.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from starling_engine.outputs import TokenLogprobs
from starling_engine.params import BeamSearchParams

Expand = Callable[[list[list[int]], int], Awaitable[list[TokenLogprobs]]]
"""Function (prefixes, count) -> for each prefix the `count` likeliest next tokens with their log probabilities."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A result. `tokens` and `text` begin with the prompt's, as vLLM's do; `cum_logprob` and `logprobs` are of those after it."""

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens after the prompt, with the sum of their log probabilities. `logprobs` has a row for each if the search wants them."""

    tokens: tuple[int, ...]
    cum_logprob: float
    ended: bool = False
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), compare=False)

    def score(self, length_penalty: float) -> float:
        """Returns equation 14 of https://arxiv.org/abs/1609.08144, in the simpler form of transformers and vLLM."""
        return self.cum_logprob / _power(max(1, len(self.tokens)), length_penalty)


class _Candidate(NamedTuple):
    """A beam of the last step, by its index, and one more token."""

    beam: int
    token: int
    cum_logprob: float


async def beam_search(
    prompt_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Collection[int], expand: Expand
) -> list[Beam]:
    """Returns the `beam_width` beams with the best scores, best first; fewer only if the vocabulary gives no more."""
    eos = () if params.ignore_eos else eos_token_ids
    # All end-of-sequence tokens may be among a beam's likeliest; then as many others are needed.
    count = max(params.beam_width + len(eos), params.logprobs or 0)
    running, finished = [Beam((), 0.0)], list[Beam]()
    for _ in range(params.max_tokens):
        likeliest = await expand([[*prompt_ids, *beam.tokens] for beam in running], count)
        running, ended = _advance(running, likeliest, eos, params)
        finished = _best([*finished, *ended], params)
        if _is_done(running, finished, params):
            return finished
    return _best([*finished, *running], params)


def _advance(
    beams: Sequence[Beam], likeliest: Sequence[TokenLogprobs], eos: Collection[int], params: BeamSearchParams
) -> tuple[list[Beam], list[Beam]]:
    """Adds a token to each beam; returns those that go on and those that ended. To end, a beam must be among the `width` best."""
    width = params.beam_width
    candidates = [
        _Candidate(index, token, beam.cum_logprob + entry.logprob)
        for index, (beam, row) in enumerate(zip(beams, likeliest, strict=True))
        for token, entry in row.items()
    ]
    candidates.sort(key=lambda candidate: -candidate.cum_logprob)

    def grown(candidate: _Candidate, ended: bool) -> Beam:
        beam, token = beams[candidate.beam], candidate.token
        rows = beam.logprobs
        if params.logprobs is not None:
            rows = (*rows, _listed(likeliest[candidate.beam], token, params.logprobs))
        return Beam((*beam.tokens, token), candidate.cum_logprob, ended, rows)

    running = [candidate for candidate in candidates if candidate.token not in eos][:width]
    ended = [candidate for candidate in candidates[:width] if candidate.token in eos]
    return [grown(candidate, False) for candidate in running], [grown(candidate, True) for candidate in ended]


def _listed(row: TokenLogprobs, token: int, count: int) -> TokenLogprobs:
    """Returns the entries of the beam's own token and of the `count` likeliest, as sampling lists them."""
    return {token: row[token]} | {other: entry for other, entry in row.items() if entry.rank <= count}


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
