"""Fields that clients know and this release cannot honour: refused by name unless they ask for nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starling_engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the field is refused, and the values (besides null) that ask for what happens anyway."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: object) -> bool:
        # 1 == True in Python, but `best_of: true` is a mistake that must be named.
        return value is None or any(value == plain and type(value) is type(plain) for plain in self.neutral)


TOOLS = Refusal("tools and function calls are not supported yet")
GRAMMAR = Refusal("structured output is not supported yet")
MEDIA = Refusal("images, audio and other media are not supported yet")
BEAMS = "beam search is not offered over HTTP"
REMOTE = Refusal("handing over KV caches between engines is not supported yet")

SAMPLING: Mapping[str, Refusal] = {
    "use_beam_search": Refusal(BEAMS, (False,)),
    "length_penalty": Refusal(BEAMS, (1, 1.0)),
    "early_stopping": Refusal(BEAMS, (False,)),
    "spaces_between_special_tokens": Refusal("the tokenizer alone decides on spaces between special tokens", (True,)),
    "truncate_prompt_tokens": Refusal("a prompt is never cut; shorten it before it is sent"),
    "truncation_side": Refusal("a prompt is never cut; shorten it before it is sent"),
    "response_format": Refusal("only {'type': 'text'} is supported yet, not structured output", ({"type": "text"},)),
    "structured_outputs": GRAMMAR,
    "guided_json": GRAMMAR,
    "guided_regex": GRAMMAR,
    "guided_choice": GRAMMAR,
    "guided_grammar": GRAMMAR,
    "guided_decoding_backend": GRAMMAR,
    "guided_whitespace_pattern": GRAMMAR,
    "logits_processors": Refusal("logits processors cannot be given by requests"),
    "thinking_token_budget": Refusal("limits on reasoning are not supported yet"),
    "repetition_detection": Refusal("ending an output that repeats itself is not supported yet"),
    "kv_transfer_params": REMOTE,
    "ec_transfer_params": REMOTE,
    "vllm_xargs": Refusal("there are no engine-specific extra arguments"),
    "service_tier": Refusal("there is one service tier", ("auto", "default")),
    "store": Refusal("answers are not stored", (False,)),
}

CHAT: Mapping[str, Refusal] = {
    **SAMPLING,
    "tools": Refusal(TOOLS.reason, ([],)),
    "tool_choice": Refusal(TOOLS.reason, ("none",)),
    "parallel_tool_calls": TOOLS,
    "functions": TOOLS,
    "function_call": Refusal(TOOLS.reason, ("none",)),
    "modalities": Refusal(MEDIA.reason, (["text"],)),
    "audio": MEDIA,
    "mm_processor_kwargs": MEDIA,
    "media_io_kwargs": MEDIA,
    "documents": Refusal("documents for retrieval are not supported yet"),
    "reasoning_effort": Refusal("reasoning is not supported yet", ("none",)),
    "include_reasoning": Refusal("reasoning is not supported yet", (True, False)),
    "verbosity": Refusal("the model has no setting for verbosity", ("medium",)),
    "prediction": Refusal("predicted outputs are not supported yet"),
    "web_search_options": Refusal("there is no web search"),
    "moderation": Refusal("there is no moderation"),
    "prompt_cache_retention": Refusal("cached prompts live until their memory is needed"),
    "use_audio_in_video": MEDIA,
}

COMPLETION: Mapping[str, Refusal] = {
    **SAMPLING,
    "suffix": Refusal("filling in the middle is not supported yet"),
    "prompt_embeds": Refusal("prompts as embeddings are not supported yet"),
}

EMBEDDING: Mapping[str, Refusal] = {
    "dimensions": Refusal("this model's vectors cannot be shortened"),
    "truncate_prompt_tokens": SAMPLING["truncate_prompt_tokens"],
    "truncation_side": SAMPLING["truncation_side"],
    "messages": Refusal("embeddings of chats are not supported; render them with /tokenize and send token ids"),
    "mm_processor_kwargs": MEDIA,
    "embed_dtype": Refusal("vectors are float32", ("float32",)),
    "endianness": Refusal("base64 vectors are little-endian", ("little", "native")),
}

TOKENIZE: Mapping[str, Refusal] = {"tools": CHAT["tools"], "documents": CHAT["documents"], "mm_processor_kwargs": MEDIA}


def without_refused(fields: dict[str, Any], refusals: Mapping[str, Refusal]) -> dict[str, Any]:
    """The fields less those in `refusals` that ask for nothing. Raises InvalidRequest for the first that does ask."""
    for name, refusal in refusals.items():
        if name in fields and not refusal.accepts(fields[name]):
            raise InvalidRequest(f"{name}: {refusal.reason}", name)
    return {name: value for name, value in fields.items() if name not in refusals}
