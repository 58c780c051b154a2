"""The request as it goes to an engine core (vLLM's EngineCoreRequest): all that any core needs to start or to continue it."""

from collections.abc import Sequence

import msgspec

from starling_engine.params import PoolingParams, SamplingParams


class ReasoningLimit(msgspec.Struct, frozen=True):
    """Allows at most `tokens` between the tokens `opens` and `ends`. `is_open`: the prompt has begun to reason.

    One token of each step of `then` follows where it is the limit that ended reasoning.
    """

    opens: Sequence[int]
    ends: Sequence[int]
    tokens: int
    is_open: bool
    then: Sequence[Sequence[int]] = ()


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to compute. It is its own resume record: the frontend keeps it up to date, and any core can continue from it.

    A request with `n` outputs is n of these; the later ones name the first in `fork_of` and share its prompt's blocks.

    output_ids                tokens so far, from an earlier attempt or another core
    seed                      always set: random numbers depend on (seed, position) alone
    cache_salt                decides with the tokens which cached blocks are valid
    priority                  lower runs earlier; where requests run in order of arrival, below 0 says that the prompt goes first
    arrival                   seconds since the Unix epoch
    attempt                   counts the cores that were asked; answers to an earlier attempt are ignored
    grammar                   what the output has to follow, in the words of the grammar library; empty where nothing restricts it
    grammar_field             the request's field that asks for it
    reasoning_limit           how many tokens of reasoning the output has at most; None where nothing limits them
    prediction_ids            what the output is expected to be: drafts for speculative decoding
    num_prompt_logprobs_sent  the prompt's positions whose log probabilities were sent already
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = SamplingParams()
    pooling: PoolingParams | None = None
    output_ids: list[int] = []
    seed: int = 0
    cache_salt: str | None = None
    priority: int = 0
    arrival: float = 0.0
    attempt: int = 0
    num_prompt_logprobs_sent: int = 0
    fork_of: str | None = None
    prediction_ids: Sequence[int] = []
    grammar: str = ""
    grammar_field: str | None = None
    reasoning_limit: ReasoningLimit | None = None
