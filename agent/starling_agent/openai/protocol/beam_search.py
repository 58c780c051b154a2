"""Fields of beam search, and those that do not go with it."""

from collections.abc import Mapping

from starling_engine import BeamSearchParams
from starling_engine.errors import InvalidRequest

from starling_agent.openai.protocol.refused import FieldRefusal
from starling_agent.openai.protocol.sampling import SamplingFields
from starling_agent.openai.protocol.structured_outputs import StructuredOutputFields

HONOURED = frozenset({
    "model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
    "chat_template_kwargs", "priority", "cache_salt", "request_id", "use_beam_search", "length_penalty", "n", "best_of",
    "max_tokens", "max_completion_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs",
    "top_logprobs", "echo", "return_token_ids", "return_tokens_as_token_ids", "user", "metadata", "safety_identifier",
    "prompt_cache_key", "reasoning_effort", "reasoning",
})  # fmt: skip
WITHOUT_EFFECT = frozenset(("seed", "speculative"))
"""Fields that are accepted with any value: a search draws nothing, and its steps are too short for drafts."""

OTHER = FieldRefusal("does not go with use_beam_search")
_DRAWS = "a beam search draws no tokens, and scores by the model's own probabilities"
WITH_BEAMS: Mapping[str, FieldRefusal] = {
    "stream": FieldRefusal("the best outputs are known at the end of a beam search; leave out stream", (False,)),
    "temperature": FieldRefusal(f"{_DRAWS}; only 0 and 1 are possible", (0.0, 1.0)),
    "top_p": FieldRefusal(_DRAWS, (1.0,)),
    "top_k": FieldRefusal(_DRAWS, (0, -1)),
    "min_p": FieldRefusal(_DRAWS, (0.0,)),
    "presence_penalty": FieldRefusal(_DRAWS, (0.0,)),
    "frequency_penalty": FieldRefusal(_DRAWS, (0.0,)),
    "repetition_penalty": FieldRefusal(_DRAWS, (1.0,)),
    "logit_bias": FieldRefusal(_DRAWS, ({},)),
    "banned_token_ids": FieldRefusal(_DRAWS, ([],)),
    "bad_words": FieldRefusal(_DRAWS, ([],)),
    "tools": FieldRefusal(OTHER.reason, ([],)),
    "tool_choice": FieldRefusal(OTHER.reason, ("none", "auto")),
    "parallel_tool_calls": FieldRefusal(OTHER.reason, (True, False)),
    "include_reasoning": FieldRefusal("beams are not split into content and reasoning", (True,)),
    "thinking_token_budget": FieldRefusal("reasoning has no limit in a beam search"),
    "min_tokens": FieldRefusal(OTHER.reason, (0,)),
    "stop": FieldRefusal(OTHER.reason, ([],)),
    "stop_token_ids": FieldRefusal(OTHER.reason, ([],)),
    "early_stopping": FieldRefusal(
        "a beam search goes on until no better output is possible; only 'never' is possible", ("never",)
    ),
}
WITHOUT_BEAMS: Mapping[str, FieldRefusal] = {
    "length_penalty": FieldRefusal("needs use_beam_search: true", (1.0,)),
    "early_stopping": FieldRefusal("needs use_beam_search: true", (False,)),
}


def check_beam_fields(body: SamplingFields) -> None:
    """Raises InvalidRequest for the first field that does not go with the value of `use_beam_search`."""
    if body.use_beam_search and (form := body.form()) is not None:
        raise InvalidRequest(f"{form.field}: {OTHER.reason}", form.field)
    for name in (field for field in type(body).model_fields if field not in StructuredOutputFields.model_fields):
        refusal = _refusal(name) if body.use_beam_search else WITHOUT_BEAMS.get(name)
        if refusal is not None and not refusal.accepts(getattr(body, name)):
            raise InvalidRequest(f"{name}: {refusal.reason}", name)


def _refusal(name: str) -> FieldRefusal | None:
    """Returns the refusal of a field with beam search; a field that nobody has decided on is refused, not ignored."""
    return None if name in HONOURED | WITHOUT_EFFECT else WITH_BEAMS.get(name, OTHER)


def beam_search_params(body: SamplingFields, max_tokens: int, logprobs: int | None) -> BeamSearchParams:
    """Makes the engine's parameters of checked fields. The engine's own validate() checks bounds."""
    return BeamSearchParams(
        beam_width=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
    )
