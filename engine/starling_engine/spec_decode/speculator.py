"""Speculative decoding with guesses from text: which request gets how many drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from starling_engine.config import SpeculativeConfig
from starling_engine.delta import Stats
from starling_engine.request_state import RequestState
from starling_engine.spec_decode.acceptance_log import AcceptanceLog
from starling_engine.spec_decode.drafter import Drafter
from starling_engine.spec_decode.proposers import EarlierOutputs, NgramProposer, PredictionProposer, Proposer, SuffixProposer
from starling_engine.spec_decode.verify_cost import VerifyCost

WEIGHT = 0.1
"""Weight of the latest guess in a request's acceptance."""
FIRST_ACCEPTANCE = 0.7
"""Share of guesses that are right, before there were any."""


@dataclass(slots=True)
class Guesses:
    """Guesses for one request, and how often they are right."""

    proposers: list[Proposer]
    acceptance: float
    open: list[int] = field(default_factory=list)
    """Tokens that were guessed to come next. They are compared whether or not they became drafts, so acceptance costs no step."""
    are_forced: bool = False
    """True while the request's drafts in flight are no guesses: its grammar allows no others."""


class Speculator(Drafter):
    """Gives each request as many drafts as pay: one more as long as it is accepted more often than it has to be.

    How often it has to be comes from the measured time of steps (`VerifyCost.price`). Where no draft pays, there is none.
    """

    def __init__(self, config: SpeculativeConfig, stats: Stats) -> None:
        self._config = config
        self._stats = stats
        self._log = AcceptanceLog(stats)
        self._cost = VerifyCost()
        self._guesses: dict[str, Guesses] = {}
        """Guesses of the open requests that may get drafts, by their ids."""
        self._earlier = EarlierOutputs(config)
        self._acceptance = FIRST_ACCEPTANCE
        self._tokens = self._gain = 0.0
        """Tokens of the step that is being planned, and those that it is expected to give."""
        stats.spec_accepted_per_position = [0] * config.num_speculative_tokens

    @property
    def active(self) -> bool:
        return bool(self._guesses)

    def on_added(self, request: RequestState) -> None:
        record, config = request.record, self._config
        proposers: list[Proposer] = [PredictionProposer(record.prediction_ids)] if record.prediction_ids else []
        if config.method == "ngram":
            proposers.append(NgramProposer(config))
        elif config.method == "suffix":
            proposers.append(SuffixProposer(config, self._earlier))
        if (proposers or record.grammar) and record.params.speculative and record.pooling is None:
            self._guesses[record.id] = Guesses(proposers, self._acceptance)

    def waits(self, request: RequestState) -> bool:
        return request.record.id in self._guesses

    def begin_step(self, rows: int) -> None:
        self._tokens = self._gain = float(rows)

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        guesses = self._guesses.get(request.record.id)
        if guesses is None:
            return ()
        most = min(most, self._config.num_speculative_tokens)
        forced = request.constraint.forced()[:most] if request.constraint is not None else ()
        guesses.are_forced = bool(forced)
        if forced:
            return self._jump_forward(forced)
        if not guesses.open:
            guesses.open = self._guess(guesses, request)
        return guesses.open[: self._affordable(guesses.acceptance, min(most, len(guesses.open)))]

    def _jump_forward(self, forced: Sequence[int]) -> Sequence[int]:
        """Takes drafts that will all be accepted. Each costs as much now as the row that it saves would cost later."""
        self._tokens += len(forced)
        self._gain += len(forced)
        return forced

    def _guess(self, guesses: Guesses, request: RequestState) -> list[int]:
        """Returns the guess of the first proposer that has any, as far as the request's grammar allows it."""
        proposed = (proposer.propose(request, self._config.num_speculative_tokens) for proposer in guesses.proposers)
        guess = next(filter(None, proposed), [])
        if guess and request.constraint is not None:
            return guess[: request.constraint.allowed(guess)]
        return guess

    def _affordable(self, acceptance: float, most: int) -> int:
        """Returns how many drafts pay: the n-th is accepted only if all before it are."""
        count, likelihood = 0, acceptance
        while count < most and likelihood >= self._cost.price(self._tokens, self._gain):
            self._tokens += 1
            self._gain += likelihood
            likelihood *= acceptance
            count += 1
        return count

    # ---- results ----

    def on_step(self, tokens: int, seconds: float) -> None:
        self._cost.observe(tokens, seconds)

    def on_sampled(self, request: RequestState, num_drafts: int, sampled: Sequence[int]) -> int:
        guesses = self._guesses.get(request.record.id)
        if guesses is None:
            return num_drafts
        if guesses.are_forced:
            self._stats.jump_forward_tokens_total += len(sampled) - 1
            num_drafts = 0
        elif num_drafts:
            self._count(num_drafts, len(sampled) - 1)
        for token in sampled:
            if not guesses.open:
                break
            right = guesses.open[0] == token
            guesses.acceptance += WEIGHT * (right - guesses.acceptance)
            guesses.open = guesses.open[1:] if right else []
        return num_drafts

    def _count(self, num_drafts: int, accepted: int) -> None:
        stats = self._stats
        stats.spec_drafts_total += 1
        stats.spec_draft_tokens_total += num_drafts
        stats.spec_accepted_tokens_total += accepted
        for position in range(accepted):
            stats.spec_accepted_per_position[position] += 1
        self._log.update()

    def on_finished(self, request: RequestState) -> None:
        guesses = self._guesses.pop(request.record.id, None)
        if guesses is None:
            return
        self._acceptance += WEIGHT * (guesses.acceptance - self._acceptance)
        if self._config.method == "suffix":
            self._earlier.add(request.tokens[request.num_prompt :], request.record.cache_salt or "")
