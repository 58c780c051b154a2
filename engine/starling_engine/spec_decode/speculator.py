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
from starling_engine.step import OWN

WEIGHT = 0.1
"""Weight of the latest guess in a request's acceptance, at least: the first guesses weigh more."""
FIRST_ACCEPTANCE = 0.7
"""Share of guesses that are right, before there were any."""
FIRST_COUNTS = 3
"""Guesses that the acceptance which a request begins with counts as: few, so that text which never hits is known soon."""


@dataclass(slots=True)
class Guesses:
    """Guesses for one request, and how often they are right."""

    proposers: list[Proposer]
    acceptance: float
    may_be_own: bool
    """True if the device may make the drafts; the proposers' guesses then only say how likely it is to find any, and right ones."""
    open: list[int] = field(default_factory=list)
    """Tokens that were guessed to come next. They are compared whether or not they became drafts, so acceptance costs no step."""
    taken: int = 0
    """Guesses that were compared so far."""
    are_forced: bool = False
    """True while the request's drafts in flight are no guesses: its grammar allows no others."""

    def take(self, *, right: bool) -> None:
        """Takes whether a guess was right."""
        self.taken += 1
        self.acceptance += max(WEIGHT, 1 / (FIRST_COUNTS + self.taken)) * (right - self.acceptance)


def _are_own(guesses: Guesses, request: RequestState) -> bool:
    """Returns whether a request's drafts are the device's OWN: those of a row with a mask have to be known."""
    return guesses.may_be_own and request.constraint is None


class Speculator(Drafter):
    """Gives each request as many drafts as pay: one more as long as it is accepted more often than it has to be.

    How often it has to be comes from the measured time of steps (`VerifyCost.price`). Where no draft pays, there is none.

    With `own_drafts` the device makes those of method ngram, but for requests with a prediction or a constraint.
    """

    def __init__(self, config: SpeculativeConfig, stats: Stats, *, own_drafts: bool = False) -> None:
        self._config = config
        self._own_drafts = own_drafts and config.method == "ngram"
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
            may_be_own = self._own_drafts and not record.prediction_ids
            self._guesses[record.id] = Guesses(proposers, self._acceptance, may_be_own)

    def waits(self, request: RequestState) -> bool:
        guesses = self._guesses.get(request.record.id)
        return guesses is not None and not _are_own(guesses, request)

    def begin_step(self, rows: int) -> None:
        self._tokens = self._gain = float(rows)

    def propose(self, request: RequestState, most: int) -> Sequence[int]:
        guesses = self._guesses.get(request.record.id)
        if guesses is None:
            return ()
        most = min(most, self._config.num_speculative_tokens)
        forced = request.constraint.forced(most) if request.constraint is not None else ()
        guesses.are_forced = bool(forced)
        if forced:
            return self._jump_forward(forced)
        if not guesses.open:
            guesses.open = self._guess(guesses, request)
        if _are_own(guesses, request):
            # Text that does not repeat yet will hardly do so once the steps in flight have run.
            return [OWN] * self._affordable(guesses.acceptance, most if guesses.open else 0)
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
        """Returns how many drafts pay: the n-th is accepted only if all before it are.

        The first has to promise its price and `WEIGHT`, by which one right guess raises acceptance. Otherwise text that hits by
        chance would get drafts after each hit.
        """
        count, likelihood, margin = 0, acceptance, WEIGHT
        while count < most and likelihood >= self._cost.price(self._tokens, self._gain) + margin:
            margin = 0.0
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
        own = num_drafts if _are_own(guesses, request) else 0
        for at in range(min(own, len(sampled))):
            guesses.take(right=at < len(sampled) - 1)
        for token in sampled:
            if not guesses.open:
                break
            right = guesses.open[0] == token
            if not own:
                guesses.take(right=right)
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
        if guesses is None or not guesses.proposers:
            return
        self._acceptance += WEIGHT * (guesses.acceptance - self._acceptance)
        if self._config.method == "suffix":
            self._earlier.add(request.tokens[request.num_prompt :], request.record.cache_salt or "")
