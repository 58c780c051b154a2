"""Fields of other servers that this release does not support: refused by name, except for values without effect."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starling_engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class FieldRefusal:
    """The reason for a refusal, and the values, other than null, that have no effect and are accepted."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: object) -> bool:
        # 1 == True in Python, but `best_of: true` is a mistake that must be named.
        return value is None or any(value == plain and type(value) is type(plain) for plain in self.neutral)


FUNCTIONS = "this is the older form of tools and tool_choice, which are possible"
MEDIA = FieldRefusal("images, audio and other media are not supported yet")
WHITE_SPACE = FieldRefusal("white space in JSON is up to the server; structured_outputs.disable_any_whitespace leaves none")
BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
BACKEND = FieldRefusal(f"llguidance enforces every form; {', '.join(BACKENDS)} are accepted, and change nothing", BACKENDS)
CACHE_LIFE = FieldRefusal("cached prompts live until their memory is needed")
REMOTE = FieldRefusal("handing over KV caches between engines is not supported yet")

SAMPLING: Mapping[str, FieldRefusal] = {
    "no_stop_trim": FieldRefusal("this is SGLang's name of include_stop_str_in_output, which is possible", (False,)),
    "return_hidden_states": FieldRefusal("hidden states are not returned", (False,)),
    "spaces_between_special_tokens": FieldRefusal("the tokenizer alone decides on spaces between special tokens", (True,)),
    "truncate_prompt_tokens": FieldRefusal("a prompt is never cut; shorten it before it is sent"),
    "truncation_side": FieldRefusal("a prompt is never cut; shorten it before it is sent"),
    "guided_decoding_backend": BACKEND,
    "guided_whitespace_pattern": WHITE_SPACE,
    "logits_processors": FieldRefusal("logits processors cannot be given by requests"),
    "kv_transfer_params": REMOTE,
    "ec_transfer_params": REMOTE,
    "vllm_xargs": FieldRefusal("there are no engine-specific extra arguments"),
    "service_tier": FieldRefusal("there is one service tier", ("auto", "default")),
    "store": FieldRefusal("answers are not stored", (False,)),
}

STRUCTURED_OUTPUTS: Mapping[str, FieldRefusal] = {
    "backend": BACKEND,
    "_backend": BACKEND,
    "_backend_was_auto": FieldRefusal("this is for vLLM's own use", (False,)),
    "disable_fallback": FieldRefusal("there is no other backend to fall back on", (False, True)),
    "disable_additional_properties": FieldRefusal("a schema says so itself, by additionalProperties: false", (False,)),
    "whitespace_pattern": WHITE_SPACE,
}

CHAT: Mapping[str, FieldRefusal] = {
    **SAMPLING,
    "separate_reasoning": FieldRefusal("reasoning is apart from content wherever the model's format is known", (True,)),
    "stream_reasoning": FieldRefusal("reasoning is streamed as it comes; include_reasoning: false leaves it out", (True,)),
    "functions": FieldRefusal(FUNCTIONS, ([],)),
    "function_call": FieldRefusal(FUNCTIONS, ("none",)),
    "modalities": FieldRefusal(MEDIA.reason, (["text"],)),
    "audio": MEDIA,
    "mm_processor_kwargs": MEDIA,
    "media_io_kwargs": MEDIA,
    "documents": FieldRefusal("documents for retrieval are not supported yet"),
    "verbosity": FieldRefusal("the model has no setting for verbosity", ("medium",)),
    "web_search_options": FieldRefusal("there is no web search"),
    "moderation": FieldRefusal("there is no moderation"),
    "prompt_cache_retention": CACHE_LIFE,
    "prompt_cache_options": CACHE_LIFE,
    "use_audio_in_video": MEDIA,
}

COMPLETION: Mapping[str, FieldRefusal] = {
    **SAMPLING,
    "suffix": FieldRefusal("filling in the middle is not supported yet"),
    "prompt_embeds": FieldRefusal("prompts as embeddings are not supported yet"),
}

POOLED: Mapping[str, FieldRefusal] = {
    "priority": FieldRefusal("prompts of vectors and scores run in order of arrival", (0,)),
    "mm_processor_kwargs": MEDIA,
}

EMBEDDING: Mapping[str, FieldRefusal] = {
    **POOLED,
    "embed_dtype": FieldRefusal("vectors are float32", ("float32",)),
    "endianness": FieldRefusal("base64 vectors are little-endian", ("little", "native")),
}

EMBED: Mapping[str, FieldRefusal] = {"images": FieldRefusal(MEDIA.reason, ([],)), "priority": POOLED["priority"]}

JINA: Mapping[str, FieldRefusal] = {
    "late_chunking": FieldRefusal("each input has a vector of its own", (False,)),
    "embedding_type": FieldRefusal("this is Jina's name of encoding_format, which is possible", ("float",)),
    "truncate": FieldRefusal("this is Jina's field; truncate_prompt_tokens: -1 does it", (False,)),
    "normalized": FieldRefusal("this is Jina's name of normalize, which is possible"),
    "return_multivector": FieldRefusal("an input has one vector", (False,)),
}

ACTIVATION = FieldRefusal("this is an older name of use_activation, which is possible")

SCORE: Mapping[str, FieldRefusal] = {**POOLED, "softmax": ACTIVATION, "activation": ACTIVATION}
CLASSIFY = SCORE

RERANK: Mapping[str, FieldRefusal] = {
    **SCORE,
    "rank_fields": FieldRefusal("a document is one text; send the fields' texts as one"),
    "max_chunks_per_doc": FieldRefusal("documents are not cut into chunks", (1,)),
    "return_embeddings": FieldRefusal("answers have no vectors; ask /v1/embeddings", (False,)),
}

TOKENIZE: Mapping[str, FieldRefusal] = {"documents": CHAT["documents"], "mm_processor_kwargs": MEDIA}


def without_refused(fields: dict[str, Any], refusals: Mapping[str, FieldRefusal], path: str = "") -> dict[str, Any]:
    """Removes fields in `refusals` whose values have no effect. Raises InvalidRequest for the first that has one.

    `path` goes before a field's name.
    """
    for name, refusal in refusals.items():
        if name in fields and not refusal.accepts(fields[name]):
            raise InvalidRequest(f"{path}{name}: {refusal.reason}", f"{path}{name}")
    return {name: value for name, value in fields.items() if name not in refusals}
