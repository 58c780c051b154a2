"""Over a hundred bad requests. Each gets an error in OpenAI's form that names the field, and the engine stays idle and usable.

The file is one table of cases, and as long as that.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
HELLO = [{"role": "user", "content": "Hello"}]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "pydoc", "messages": HELLO, "max_tokens": 4},
    COMPLETION: {"model": "pydoc", "prompt": "Hello", "max_tokens": 4},
    EMBEDDING: {"model": "pydoc", "input": "Hello"},
    **{path: {"model": "pydoc"} for path in RERANK},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
}
TOO_LONG = "word " * 6000


@dataclass(frozen=True)
class BadRequest:
    """A body that differs from the route's good one in `fields`, or is `raw`; and the expected answer."""

    fields: dict[str, Any] = field(default_factory=dict)
    param: str | None = None
    path: str = COMPLETION
    raw: bytes | None = None
    status: int = 400
    code: str | None = None
    message: str = ""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        # Python writes NaN and Infinity, which are not JSON, but many clients send them.
        return json.dumps({**BASES.get(self.path, {}), **self.fields}).encode()


def one(name: str, value: Any, **more: Any) -> BadRequest:
    """Makes a completion with a bad value in one field, which is named."""
    return BadRequest({name: value}, param=more.pop("param", name), **more)


def chat(name: str, value: Any, **more: Any) -> BadRequest:
    return one(name, value, path=CHAT, **more)


NAN, INF = float("nan"), float("inf")

NUMBERS = [
    one("temperature", -0.1),
    one("temperature", NAN),
    one("temperature", INF),
    one("temperature", "0.5"),
    one("temperature", True),
    one("temperature", [1]),
    one("temperature", 101),
    one("temperature", 10**400),
    one("top_p", 0),
    one("top_p", 1.1),
    one("top_p", -1),
    one("top_p", NAN),
    one("top_k", -2),
    one("top_k", 1.5),
    one("top_k", 2**31),
    one("min_p", -0.5),
    one("min_p", 2),
    one("min_p", NAN),
    one("presence_penalty", 2.5),
    one("presence_penalty", -INF),
    one("frequency_penalty", -2.5),
    one("frequency_penalty", NAN),
    one("repetition_penalty", 0),
    one("repetition_penalty", -1),
    one("repetition_penalty", INF),
    one("seed", 2**63),
    one("seed", -(2**63) - 1),
    one("seed", 1.5),
    one("seed", "one"),
    one("n", 0),
    one("n", -1),
    one("n", 1_000_000),
    one("n", 10**30),
    one("n", "2"),
    one("max_tokens", 0),
    one("max_tokens", -5, message="must be in [1, 2147483647], got -5"),
    one("max_tokens", 1.5),
    one("max_tokens", 2**31),
    one("max_tokens", 4096),
    one("max_completion_tokens", -1),
    chat("max_tokens", 0),
    chat("max_completion_tokens", 0),
    chat("max_completion_tokens", 100_000, code="context_length_exceeded"),
    one("min_tokens", -1),
    one("min_tokens", 5),
    one("logprobs", 21),
    one("logprobs", -1),
    one("logprobs", True),
    one("prompt_logprobs", 21),
    one("prompt_logprobs", -2),
    BadRequest({"prompt": [7] * 4000, "n": 128, "prompt_logprobs": 20}, "prompt_logprobs", message="at most 300000"),
    chat("top_logprobs", 3, message="logprobs: true"),
    BadRequest({"logprobs": True, "top_logprobs": 21}, "top_logprobs", CHAT),
    chat("logprobs", 3),
    one("priority", 1, message="priority: this server"),
    one("priority", 2**40),
]

TEXTS_AND_LISTS = [
    one("prompt", None),
    one("prompt", ""),
    one("prompt", []),
    one("prompt", [""], param="prompt[0]"),
    one("prompt", 5),
    one("prompt", {"text": "x"}),
    one("prompt", ["a", 1], param="prompt[1]"),
    one("prompt", [1, "a"], param="prompt[1]"),
    one("prompt", [1, 2.5], param="prompt[1]"),
    one("prompt", [True, False], param="prompt[0]"),
    one("prompt", [[1], []], param="prompt[1]"),
    one("prompt", [[1], ["a"]], param="prompt[1][0]"),
    one("prompt", [None], param="prompt[0]"),
    one("prompt", [999_999], param="prompt[0]", message="vocabulary"),
    one("prompt", [1, -1], param="prompt[1]"),
    one("prompt", [10**30], param="prompt[0]"),
    one("prompt", ["x"] * 3000, message="at most 2048"),
    one("prompt", TOO_LONG, code="context_length_exceeded", message="4096"),
    one("prompt", ["short", TOO_LONG], param="prompt[1]", code="context_length_exceeded"),
    one("prompt", [7] * 5000, code="context_length_exceeded", message="5000"),
    one("prompt", "x" * 20_000_000, code="context_length_exceeded", message="20000000 characters"),
    BadRequest({"prompt": [7] * 4090, "max_tokens": 10}, "max_tokens", code="context_length_exceeded", message="4100"),
    one("stop", ""),
    one("stop", ["ok", ""]),
    one("stop", 3),
    one("stop", ["a", 3], param="stop[1]"),
    one("stop", [f"stop{i}" for i in range(5000)], message="at most"),
    one("stop_token_ids", [5000]),
    one("stop_token_ids", [-1]),
    one("stop_token_ids", ["a"], param="stop_token_ids[0]"),
    one("stop_token_ids", 7),
    one("logit_bias", {"99999": 1}),
    one("logit_bias", {"-1": 1}),
    one("logit_bias", {"cat": 1}),
    one("logit_bias", {"1": 101}),
    one("logit_bias", {"1": NAN}),
    one("logit_bias", {"1": "much"}, param="logit_bias.1"),
    one("logit_bias", [1, 2]),
    one("logit_bias", {str(i): 1 for i in range(2000)}, message="at most"),
    one("allowed_token_ids", []),
    one("allowed_token_ids", [4096]),
    BadRequest({"allowed_token_ids": [5], "banned_token_ids": [5]}, "allowed_token_ids"),
    one("banned_token_ids", [10**12]),
    one("bad_words", ["antidisestablishmentarianism"], param="bad_words[0]", message="tokens"),
    one("bad_words", [" "], param="bad_words[0]"),
    one("bad_words", "no list"),
    one("cache_salt", ""),
    one("request_id", "two words"),
    one("request_id", "x" * 200),
    one("user", 5),
    one("ignore_eos", "yes"),
    one("stream", "yes"),
    one("stream", 1),
    BadRequest({"stream_options": {"include_usage": True}}, "stream_options"),
    BadRequest({"stream": True, "stream_options": {"include_usege": True}}, "stream_options.include_usege"),
    BadRequest({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    BadRequest({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    BadRequest({"stream": True, "temperature": -1}, "temperature"),
    BadRequest({"stream": True, "prompt": [7] * 5000}, "prompt", code="context_length_exceeded"),
]

MESSAGES = [
    chat("messages", None),
    chat("messages", []),
    chat("messages", "Hello"),
    chat("messages", {}),
    chat("messages", ["Hello"], param="messages[0]"),
    chat("messages", [{}], param="messages[0].role"),
    chat("messages", [{"role": "user"}], param="messages[0].content"),
    chat("messages", [{"role": "wizard", "content": "x"}], param="messages[0].role", message="messages[0].role: must be one of"),
    chat("messages", [{"role": "function", "content": "x"}], param="messages[0].role", message="'tool'"),
    chat("messages", [{"role": "user", "content": "x", "tool_calls": [{}]}], param="messages[0].tool_calls"),
    chat("messages", [{"role": ["user"], "content": "x"}], param="messages[0].role"),
    chat("messages", [*HELLO, {"role": "user", "content": None}], param="messages[1].content"),
    chat("messages", [{"role": "user", "content": 5}], param="messages[0].content"),
    chat("messages", [{"role": "user", "content": []}], param="messages[0].content"),
    chat("messages", [{"role": "user", "content": ["x"]}], param="messages[0].content[0]"),
    chat("messages", [{"role": "user", "content": [{"type": "text"}]}], param="messages[0].content[0].text"),
    chat(
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
        param="messages[0].content[1].type",
        message="images",
    ),
    chat("messages", [{"role": "user", "content": "x", "mood": "good"}], param="messages[0].mood"),
    chat("messages", [{"role": "user", "content": "x", "name": 5}], param="messages[0].name"),
    chat("messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}], param="messages[0].tool_calls[0]"),
    chat("messages", [{"role": "user", "content": TOO_LONG}], code="context_length_exceeded", message="4096"),
    chat("add_generation_prompt", "no"),
    chat("continue_final_message", True, message="add_generation_prompt"),
    chat("chat_template", "{{ messages }}", message="trust-request-chat-template"),
    chat("chat_template_kwargs", [1]),
    chat("chat_template_kwargs", {"messages": []}, param="chat_template_kwargs.messages"),
    chat("chat_template_kwargs", {"a": "x" * (1 << 20)}),
]

PREDICTIONS = [
    chat("prediction", {"type": "text", "content": "x"}, param="prediction.type"),
    chat("prediction", {"type": "content"}, param="prediction.content"),
    chat("prediction", {"type": "content", "content": [{"type": "image_url"}]}, param="prediction.content[0].type"),
    chat("prediction", {"type": "content", "content": "x", "more": 1}, param="prediction.more"),
    chat("speculative", "no"),
]

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

FORMS = [
    chat("response_format", "json_object"),
    chat("response_format", {}, param="response_format.type", message="required"),
    chat("response_format", {"type": "xml"}, param="response_format.type", message="'json_object', 'json_schema'"),
    one("response_format", {"type": "json_schema"}, param="response_format.json_schema", message="required"),
    one("response_format", {"type": "json_schema", "json_schema": []}, param="response_format.json_schema"),
    *(
        one(
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", **fields}},
            param=f"response_format.json_schema.{name}",
        )
        for name, fields in [
            ("schema", {}),
            ("schema", {"schema": None}),
            ("schema", {"schema": "{}"}),
            ("strict", {"schema": {}, "strict": "yes"}),
            ("schma", {"schema": {}, "schma": {}}),
        ]
    ),
    chat("response_format", {**SCHEMA, "type": "json_object"}, param="response_format.json_schema", message="no meaning"),
    chat("response_format", {"type": "json_object", "schema": {}}, param="response_format.schema", message="unknown field"),
    chat("response_format", {"type": "structural_tag"}, param="response_format.format", message="required"),
    chat("response_format", {"type": "structural_tag", "structures": []}, param="response_format.triggers", message="required"),
    chat(
        "response_format",
        {"type": "structural_tag", "structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<a>"]},
        param="response_format.structures[0].schema",
        message="required",
    ),
    chat("structured_outputs", "json"),
    chat("structured_outputs", {}, message="needs one of json"),
    chat("structured_outputs", {"json_object": False}, message="needs one of"),
    chat("structured_outputs", {"json": 5}, param="structured_outputs.json", message="JSON schema"),
    one("structured_outputs", {"regex": ["a"]}, param="structured_outputs.regex"),
    one("structured_outputs", {"choice": "a"}, param="structured_outputs.choice"),
    one("structured_outputs", {"choice": ["a", 1]}, param="structured_outputs.choice[1]"),
    one("structured_outputs", {"grammer": "a"}, param="structured_outputs.grammer", message="unknown field"),
    one("structured_outputs", {"json": {}, "regex": "a"}, param="structured_outputs.regex", message="structured_outputs.json and"),
    one("structured_outputs", {"json": {}, "whitespace_pattern": " "}, param="structured_outputs.whitespace_pattern"),
    one("structured_outputs", {"json": {}, "backend": "mine"}, param="structured_outputs.backend", message="llguidance"),
    one(
        "structured_outputs",
        {"json": {}, "disable_additional_properties": True},
        param="structured_outputs.disable_additional_properties",
    ),
    one("guided_json", 5),
    one("guided_regex", {"a": 1}),
    one("guided_choice", [1], param="guided_choice[0]"),
    one("guided_grammar", ["a"]),
    one("guided_whitespace_pattern", "[ ]?"),
    one("guided_decoding_backend", "mine", message="llguidance"),
    BadRequest({"response_format": SCHEMA, "guided_json": {}}, "guided_json", message="response_format.json_schema.schema and"),
    BadRequest(
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", CHAT
    ),
    BadRequest({"guided_regex": "a", "guided_choice": ["a"], "stream": True}, "guided_choice", CHAT, message="guided_regex and"),
]

REPETITIONS = [
    one("repetition_detection", True),
    one("repetition_detection", {"max_pattern_size": 3}, param="repetition_detection.min_count", message="[2, 1000]"),
    one("repetition_detection", {"max_pattern_size": 1025, "min_count": 2}, param="repetition_detection.max_pattern_size"),
    chat("repetition_detection", {"max_pattern_size": 3, "min_count": "2"}, param="repetition_detection.min_count"),
    chat("repetition_detection", {"max_size": 3}, param="repetition_detection.max_size", message="unknown field"),
]

NOT_YET = [
    chat("tools", [{"type": "function", "function": {"name": "f"}}], message="--tool-call-parser"),
    chat("functions", [{"name": "f"}], message="older form of tools"),
    chat("modalities", ["text", "audio"]),
    chat("audio", {"voice": "alloy"}),
    chat("reasoning_effort", "high", message="no levels of reasoning"),
    chat("reasoning", {"enabled": False, "effort": "low"}, param="reasoning.enabled"),
    chat("reasoning", {"enabled": False, "max_tokens": 8}, param="reasoning.enabled"),
    chat("reasoning", {"enabled": True, "effort": "none"}, param="reasoning.enabled"),
    chat("web_search_options", {}),
    chat("service_tier", "flex"),
    chat("store", True),
    one("best_of", 3),
    one("best_of", True),
    one("suffix", "end"),
    one("truncate_prompt_tokens", 5),
    one("logits_processors", ["x"]),
    one("kv_transfer_params", {}),
    one("prompt_embeds", "AAAA"),
    one("temprature", 1.0, message="did you mean temperature"),
    chat("max_token", 5, message="did you mean max_tokens"),
    one("x" * 10_000, 1, param="x" * 200),
    one("model", "gpt-9", status=404, code="model_not_found"),
    chat("model", "", status=404, code="model_not_found"),
    one("model", "PYDOC", path=EMBEDDING, status=404, code="model_not_found"),
    one("model", 5),
]

BEAMS = [
    one("length_penalty", 2.0, message="needs use_beam_search"),
    one("early_stopping", True, message="needs use_beam_search"),
    one("early_stopping", "never"),
    one("use_beam_search", 1),
    BadRequest({"use_beam_search": True, "guided_regex": "a"}, "guided_regex", COMPLETION),
    BadRequest({"use_beam_search": True, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", CHAT),
    *(
        BadRequest({"use_beam_search": True, name: value}, name, path)
        for path in (COMPLETION, CHAT)
        for name, value in {
            "stream": True,
            "n": 0,
            "temperature": 0.7,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop": "x",
            "stop_token_ids": [5],
            "logit_bias": {"5": 1},
            "allowed_token_ids": [5, 6],
            "banned_token_ids": [5],
            "bad_words": ["x"],
            "prompt_logprobs": 1,
            "priority": 1,
            "length_penalty": 21,
            "early_stopping": False,
            "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
        }.items()
    ),
    BadRequest({"use_beam_search": True, "n": 20}, "n", message="n must be in [1, 18], got 20"),
    BadRequest({"use_beam_search": True, "n": 2, "best_of": 3}, "best_of"),
    BadRequest({"use_beam_search": True, "logprobs": 21}, "logprobs"),
    BadRequest({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo", message="of the prompt"),
    BadRequest({"use_beam_search": True, "echo": True, "max_tokens": 0}, "max_tokens"),
    BadRequest({"use_beam_search": True, "max_tokens": 4096}, "max_tokens", code="context_length_exceeded"),
    BadRequest({"use_beam_search": True, "length_penalty": INF}, "length_penalty"),
    BadRequest({"use_beam_search": True, "prompt": ["x"] * 100, "n": 18}, "n", message="1800 outputs"),
    BadRequest({"use_beam_search": True, "logprobs": True, "top_logprobs": 21}, "top_logprobs", CHAT),
    BadRequest({"use_beam_search": True, "prediction": {"type": "content", "content": "x"}}, "prediction", CHAT),
    BadRequest({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format", CHAT),
]

OTHER_ROUTES = [
    one("input", None, path=EMBEDDING),
    one("input", "", path=EMBEDDING),
    one("input", [], path=EMBEDDING),
    one("input", [["a"]], path=EMBEDDING, param="input[0][0]"),
    one("input", [4096], path=EMBEDDING, param="input[0]"),
    one("input", [7] * 5000, path=EMBEDDING, code="context_length_exceeded"),
    one("dimensions", 0, path=EMBEDDING, message="must be in [1, 256]"),
    one("dimensions", 257, path=EMBEDDING),
    one("prompt_name", "query", path=EMBEDDING, message="possible: none"),
    one("truncate_prompt_tokens", 0, path=EMBEDDING),
    one("truncate_prompt_tokens", -2, path=EMBEDDING),
    one("truncate_prompt_tokens", 5000, path=EMBEDDING),
    one("truncation_side", "left", path=EMBEDDING, message="needs truncate_prompt_tokens"),
    one("messages", HELLO, path=EMBEDDING, param="messages", message="give one of input and messages"),
    one("add_generation_prompt", True, path=EMBEDDING, message="messages alone"),
    BadRequest({"input": None, "messages": []}, "messages", EMBEDDING),
    BadRequest({"input": None, "messages": HELLO, "prompt_name": "query"}, "prompt_name", EMBEDDING, message="input alone"),
    BadRequest({"input": None, "messages": HELLO, "chat_template": "x"}, "chat_template", EMBEDDING, message="trust-request"),
    BadRequest(
        {"input": None, "messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        EMBEDDING,
    ),
    BadRequest(
        {"input": None, "messages": [{"role": "user", "content": TOO_LONG}]}, "messages", EMBEDDING, code="context_length_exceeded"
    ),
    BadRequest({"input": "a", "task": "plugin"}, "task", "/pooling"),
    one("input", [], path="/pooling"),
    BadRequest({"text_1": "a"}, "text_1", "/score", message="give text_1 and text_2 or"),
    BadRequest({"text_1": "a", "documents": "b"}, "documents", "/score"),
    BadRequest({"text_1": "a", "text_2": []}, "text_2", "/score", message="1 to 2048 texts"),
    BadRequest({"text_1": [], "text_2": "a"}, "text_1", "/v1/score"),
    BadRequest({"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "documents", "/score", message="queries has 2"),
    BadRequest({"queries": ["a", "b"], "documents": "a"}, "documents", "/score"),
    BadRequest({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "/score"),
    BadRequest({"text_1": "a", "text_2": "b", "softmax": True}, "softmax", "/score"),
    BadRequest({"text_1": "a", "text_2": ["b"] * 3000}, "text_2", "/score"),
    BadRequest({"query": "a", "documents": []}, "documents", "/rerank"),
    BadRequest({"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "/v1/rerank"),
    BadRequest({"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc", "/v2/rerank"),
    BadRequest({"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields", "/rerank"),
    BadRequest({"query": "a", "documents": ["b", "c " * 5000]}, "documents[1]", "/rerank", code="context_length_exceeded"),
    BadRequest({"query": "a"}, "documents", "/rerank", message="required"),
    BadRequest({"input": "a"}, "model", "/classify", message="no classification head"),
    one("encoding_format", "hex", path=EMBEDDING),
    one("pooling", "max", path=EMBEDDING),
    one("prompt", None, path="/tokenize"),
    one("messages", HELLO, path="/tokenize", param="prompt"),
    one("tools", [{"type": "custom"}], path="/tokenize", message="for messages alone"),
    one("tokens", [99_999], path="/detokenize", param="tokens[0]"),
    one("tokens", "x", path="/detokenize"),
    one("tokens", [1] * 300_000, path="/detokenize", message="at most 262144"),
    BadRequest(path="/detokenize", raw=b'{"tokens": [' + b"1," * 1_100_000 + b"1]}", message="more than 1048576 values"),
    one("tokens", [1.5], path="/detokenize", param="tokens[0]"),
    BadRequest(path="/detokenize", raw=b"{}", param="tokens", message="required"),
    BadRequest(path=CHAT, raw=b'{"model": "pydoc"}', param="messages", message="required"),
    BadRequest(path=EMBEDDING, raw=b'{"model": "pydoc"}', param="input", message="required"),
]

MODELS = [
    *(
        BadRequest(path=path, raw=body, param="model", message="pydoc, org/pydoc")
        for path in (CHAT, COMPLETION, EMBEDDING, "/v1/responses", *RERANK)
        for body in (b"{}", b'{"model": null}')
    ),
    one("model", 5, message="pydoc, org/pydoc"),
    chat("model", "gpt", status=404, code="model_not_found", message="pydoc, org/pydoc"),
]

BODIES_AND_PATHS = [
    BadRequest(raw=b"", message="empty"),
    BadRequest(raw=b"   ", message="empty"),
    BadRequest(raw=b"{", message="JSON"),
    BadRequest(raw=b"not json", message="JSON"),
    BadRequest(raw=b"[]", message="object"),
    BadRequest(raw=b"null", message="object"),
    BadRequest(raw=b'"Hello"', message="object"),
    BadRequest(raw=b'{"prompt": "Hello",}', message="JSON"),
    BadRequest(raw=b'{"prompt": "\xff\xfe"}', message="JSON"),
    BadRequest(raw=b'{"prompt": "\xc3"}', message="JSON"),
    BadRequest(raw=b'{"prompt": "\\ud800"}', message="JSON"),
    BadRequest(raw=b"\x00\x01\x02", message="JSON"),
    BadRequest(raw=b"[" * 100_000, message="JSON"),
    BadRequest(raw=b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", param="prompt", message="JSON"),
    BadRequest(raw=b'{"x":"' + b'\\"' * 1_200_000 + b'","y":' + b"[" * 300 + b"]" * 300 + b"}", message="JSON"),
    BadRequest(raw=b'{"n": ' + b"9" * 5000 + b', "prompt": "x"}', message="JSON"),
    BadRequest(headers={"content-type": "text/plain"}, status=415, code="unsupported_media_type"),
    BadRequest(headers={"content-type": "application/x-www-form-urlencoded"}, status=415),
    BadRequest(raw=b"x" * (33 * 2**20), status=413, code="body_too_large"),
    BadRequest(path="/v1/nothing", status=404, code="not_found", message="/docs lists what there is"),
    BadRequest(path="/v1/v1/chat/completions", status=404, message="the nearest is /v1/chat/completions"),
    BadRequest(path="/", method="GET", status=404),
    BadRequest(path="/v1/chat", status=404),
    BadRequest(path="/v1/../etc/passwd", method="GET", status=404),
    BadRequest(path="/v1/models/none", method="GET", status=404, param="model", code="model_not_found"),
    BadRequest(path=CHAT, method="GET", status=405, code="method_not_allowed"),
    BadRequest(path=COMPLETION, method="DELETE", status=405),
    BadRequest(path="/v1/models", method="POST", status=405),
    BadRequest(path="/health", method="POST", status=405),
    BadRequest(path=CHAT, method="PATCH", status=405),
]

ALL = [
    *NUMBERS,
    *TEXTS_AND_LISTS,
    *MESSAGES,
    *PREDICTIONS,
    *FORMS,
    *REPETITIONS,
    *NOT_YET,
    *BEAMS,
    *OTHER_ROUTES,
    *MODELS,
    *BODIES_AND_PATHS,
]


def label(bad: BadRequest) -> str:
    text = f"{bad.path}-{bad.raw[:20] if bad.raw is not None else bad.fields}"
    return f"{ALL.index(bad)}-{text}"[:70]


def test_the_table_is_long_enough():
    assert len(ALL) >= 100


@pytest.mark.parametrize("bad", ALL, ids=label)
def test_the_error_names_the_bad_field(idle_server, http, bad):
    headers = {"content-type": "application/json", **bad.headers}
    answer = http.request(bad.method, bad.path, content=bad.body() if bad.method == "POST" else None, headers=headers)
    assert answer.status_code == bad.status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == bad.param, error
    assert error["message"]
    assert len(error["message"]) < 700, "it must not repeat the prompt"
    assert bad.message in error["message"]
    if bad.code is not None:
        assert error["code"] == bad.code
    assert answer.headers["x-request-id"]
    assert idle_server.is_idle()


def test_the_engine_still_answers_after_bad_requests(server, http):
    server.wait_until_idle()
    assert http.get("/health").status_code == 200
    assert http.post(CHAT, json=BASES[CHAT]).status_code == 200


def test_a_refused_method_names_the_allowed_ones(http):
    assert http.delete(CHAT).headers["allow"] == "POST"
    assert http.put("/ping").headers["allow"] == "GET, HEAD, POST"
    assert http.put("/v1/responses/resp_1").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"query": "a", "documents": [5]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": [{"txt": "a"}]}, "documents[0].txt"),
        ("/rerank", {"query": "a " * 9000, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", "b " * 9000]}, "documents[1]"),
        ("/score", {"text_1": "a " * 9000, "text_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a"], "text_2": ["b", 5]}, "text_2"),
        ("/score", {"text_1": 5, "text_2": "b"}, "text_1"),
    ],
)
def test_texts_at_fault_have_the_names_of_the_request(tools_server, path, fields, param):
    found = tools_server.http.post(path, json={"model": "tools", **fields})
    assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text


HUGE = {
    "/v1/responses": ("input", "parameters", {"type": "input_image", "image_url": "data:image/png;base64,"}),
    "/v1/messages": ("messages", "input_schema", {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}),
}


@pytest.mark.parametrize("path", HUGE)
def test_what_is_huge_is_refused_by_name(tools_server, path):
    field, schema, image = HUGE[path]
    image = {**image, "image_url": "A" * 3_000_000} if "image_url" in image else {**image, "source": {"data": "A" * 3_000_000}}
    tools = [{"type": "function", "name": f"f{n}", schema: {}} for n in range(10_000)]
    tools = tools if path == "/v1/responses" else [{**tool, "type": "custom"} for tool in tools]
    levels = b'{"model": "tools", "tools": [' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"]}"
    base: Any = {"model": "tools", "max_tokens" if path == "/v1/messages" else "max_output_tokens": 1, field: HELLO}
    for body, param in (
        (json.dumps({**base, "tools": tools}).encode(), "tools"),
        (levels, "tools"),
        (json.dumps({**base, field: [{"role": "user", "content": [image]}]}).encode(), f"{field}[0].content[0].type"),
        (json.dumps({**base, field: [{"role": "user", "content": "A" * 3_000_000}]}).encode(), field),
    ):
        answer = tools_server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert len(answer.text) < 900
