"""A beam search's requests to an engine, and its outputs in the form that all requests have.

A step is a request of one token for each beam, whose prefix comes from the prefix cache up to its last full block. So it computes
at most a block of tokens for each beam; without prefix caching it computes the whole prefix again.
"""

import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from starling_engine.errors import EngineAsleep
from starling_engine.frontend.beam import Beam
from starling_engine.frontend.detokenizer import IncrementalDetokenizer
from starling_engine.frontend.gathering import gather_or_cancel
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from starling_engine.params import BeamSearchParams, SamplingParams
from starling_engine.sleep import ASLEEP


class Complete(Protocol):
    """Returns the final output of a request; cancelled, it aborts the request."""

    def __call__(self, prompt: list[int], params: SamplingParams, *, request_id: str) -> Coroutine[Any, Any, RequestOutput]: ...


class BeamRequests:
    """Expands the beams of one search.

    num_cached_tokens    how many of the prompt's tokens were cached before it
    queue_seconds        how long its first request waited, where that is known
    first_token_seconds  from its beginning to the end of its first step
    """

    def __init__(self, complete: Complete, request_id: str, *, texts: bool) -> None:
        """`texts`: log probabilities have their tokens' texts."""
        self.num_cached_tokens = 0
        self.queue_seconds: float | None = None
        self.first_token_seconds = 0.0
        self._began = time.monotonic()
        self._complete = complete
        self._request_id = request_id
        self._texts = texts
        self._steps = 0

    async def expand(self, prefixes: list[list[int]], count: int) -> list[TokenLogprobs]:
        """Returns the `count` likeliest next tokens of each prefix. An error of one request ends the others.

        Raises as `AsyncEngine.complete` does, and EngineAsleep when the engine was put to sleep meanwhile.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, detokenize=self._texts)
        outputs = await gather_or_cancel(
            self._complete(prefix, params, request_id=f"{self._request_id}-{self._steps}-{index}")
            for index, prefix in enumerate(prefixes)
        )
        if not self._steps:
            self.num_cached_tokens, self.queue_seconds = outputs[0].num_cached_tokens, outputs[0].queue_seconds
            self.first_token_seconds = time.monotonic() - self._began
        self._steps += 1
        return [_likeliest(output.outputs[0], count) for output in outputs]


def _likeliest(output: CompletionOutput, count: int) -> TokenLogprobs:
    if output.finish_reason == "abort":  # one token cannot be half finished
        raise EngineAsleep(ASLEEP)
    assert output.logprobs is not None
    # A sampled token that is not among the likeliest has a rank above `count`.
    return {token: entry for token, entry in output.logprobs[0].items() if entry.rank <= count}


def beam_output(
    index: int, beam: Beam, prompt_ids: Sequence[int], params: BeamSearchParams, tokenizer: Tokenizer
) -> CompletionOutput:
    """Returns a beam as sampling would return the same tokens."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids)
    shown = list(beam.tokens[:-1] if hides_last(beam.ended, params) else beam.tokens)
    return CompletionOutput(
        index=index,
        text=detokenizer.push(shown, finished=True)[0],
        token_ids=list(beam.tokens),
        logprobs=None if params.logprobs is None else list(beam.logprobs),
        cumulative_logprob=beam.cum_logprob,
        finish_reason="stop" if beam.ended else "length",
    )


def hides_last(ended: bool, params: BeamSearchParams) -> bool:
    """Returns whether the last token is left out of the text: one that ends a sequence is, unless the parameters say otherwise."""
    return ended and not params.include_stop_str_in_output
