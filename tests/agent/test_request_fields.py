"""docs/request-fields.md has each field that the SDKs of OpenAI and Anthropic send, and what it says of a field holds."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
from anthropic.types import message_create_params as messages
from openai.types import EmbeddingCreateParams
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from starling_agent.openai.anthropic.protocol import MessagesRequest
from starling_agent.openai.protocol.base import RequestModel
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.protocol.completion import CompletionRequest
from starling_agent.openai.protocol.embedding import EmbeddingRequest
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_engine.errors import InvalidRequest

PAGE = (Path(__file__).parents[2] / "docs/request-fields.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (honoured|changes nothing|refused) \| (.*?) ?\|$", re.MULTILINE)
CHAT = [{"role": "user", "content": "What does len() do?"}]
APIS: dict[str, tuple[type[RequestModel], tuple[Any, ...], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        (chats.CompletionCreateParamsNonStreaming, chats.CompletionCreateParamsStreaming),
        {"model": "pydoc", "messages": CHAT},
    ),
    "/v1/completions": (
        CompletionRequest,
        (completions.CompletionCreateParamsNonStreaming, completions.CompletionCreateParamsStreaming),
        {"model": "pydoc", "prompt": "a"},
    ),
    "/v1/responses": (
        ResponsesRequest,
        (responses.ResponseCreateParamsNonStreaming, responses.ResponseCreateParamsStreaming),
        {"model": "pydoc", "input": "a"},
    ),
    "/v1/embeddings": (EmbeddingRequest, (EmbeddingCreateParams,), {"model": "pydoc", "input": "a", "encoding_format": "base64"}),
    "/v1/messages": (
        MessagesRequest,
        (messages.MessageCreateParamsNonStreaming, messages.MessageCreateParamsStreaming),
        {"model": "pydoc", "messages": CHAT, "max_tokens": 5},
    ),
}
GREEDY = {"max_tokens": 8, "temperature": 0.0}
OUTPUT: dict[str, dict[str, Any]] = {"/v1/embeddings": {}, "/v1/responses": {"max_output_tokens": 8, "temperature": 0.0}}
"""Fields that make an answer short and repeatable, where it is not GREEDY."""
HEADERS = {"user_profile_id", "workspace_id"}
"""Parameters that Anthropic's SDK sends as headers."""
VALUES: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "metadata": {"user_id": "a"},
    "prompt_cache_key": "a",
    "safety_identifier": "a",
    "stream_options": {"include_obfuscation": False},
    "user": "a",
}


class Row(NamedTuple):
    field: str
    effect: str
    note: str


def rows(path: str) -> list[Row]:
    return rows_below(f"`{path}`")


def rows_below(title: str) -> list[Row]:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [Row(*found) for found in ROW.findall(section)]


def added_by_routers() -> list[Any]:
    return [
        pytest.param(path, row, id=f"{path} {row.field}")
        for path in ("/v1/chat/completions", "/v1/completions")
        for row in rows_below("Routers of others")
        if path.startswith("/v1/chat") or "in chats alone" not in row.note
    ]


def sent_by_others() -> list[Any]:
    """Returns rows whose last column names the route."""
    found = [(path, row) for row in rows_below("Others") for path in APIS if f"`{path}`" in row.note]
    return [pytest.param(path, row, id=f"{path} {row.field}") for path, row in found]


def with_effect(effect: str) -> list[Any]:
    return [pytest.param(path, row, id=f"{path} {row.field}") for path in APIS for row in rows(path) if row.effect == effect]


@pytest.mark.parametrize("path", APIS)
def test_each_parameter_of_the_sdk_is_decided_on(path):
    """A new one fails here, until the table says what becomes of it."""
    _, params, _ = APIS[path]
    fields = [row.field for row in rows(path)]
    assert sorted(fields) == sorted(set().union(*map(get_type_hints, params)))


@pytest.mark.parametrize("path", APIS)
def test_what_is_honoured_is_a_field(path):
    model, _, _ = APIS[path]
    assert {row.field for row in rows(path) if row.effect == "honoured"} <= model.model_fields.keys()


@pytest.mark.parametrize(("path", "row"), [*with_effect("refused"), *added_by_routers(), *sent_by_others()])
def test_what_is_refused_is_refused_by_name_but_for_the_documented_values(path, row):
    model, _, base = APIS[path]
    with pytest.raises(InvalidRequest) as refusal:
        model.checked(base | {row.field: "no such value"})
    assert refusal.value.param == row.field and "unknown field" not in refusal.value.message
    documented = re.findall("`([^`]*)`", row.note.partition(";")[0]) if row.note.startswith("but ") else []
    for value in ("null", *documented):
        model.checked(base | {row.field: json.loads(value)})
    if row.field in model.refusals:
        assert [json.loads(value) for value in documented] == list(model.refusals[row.field].neutral)


def test_a_body_is_taken_as_routers_of_others_write_it():
    """The body is sglang-router's, and vllm-router adds one more."""
    body = (
        '{"messages":[{"role":"user","content":"hi"}],"model":"m","logprobs":false,"stream":false,"no_stop_trim":false,'
        '"ignore_eos":false,"continue_final_message":false,"skip_special_tokens":true,"separate_reasoning":true,'
        '"stream_reasoning":true,"return_hidden_states":false,"include_reasoning":true}'
    )
    ChatRequest.parse(body.encode())


@pytest.mark.parametrize("path", APIS)
def test_what_changes_nothing_changes_nothing(http, path):
    _, _, base = APIS[path]
    fields = {row.field: VALUES[row.field] for row in rows(path) if row.effect == "changes nothing" and row.field not in HEADERS}
    bodies = [base | OUTPUT.get(path, GREEDY) | more for more in ({}, fields)]
    plain, with_all = ([*_texts(http.post(path, json=body).raise_for_status().json())] for body in bodies)
    assert plain == with_all != []


def _texts(answer: Any) -> list[str]:
    """Returns the texts in an answer, or its vectors as texts, whichever API has made it."""
    if isinstance(answer, list):
        return [text for part in answer for text in _texts(part)]
    if not isinstance(answer, dict):
        return []
    own = [answer[name] for name in ("text", "content", "embedding") if isinstance(answer.get(name), str)]
    return own + [text for name in ("choices", "message", "output", "content", "data") for text in _texts(answer.get(name))]
