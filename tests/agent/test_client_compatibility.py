"""Requests that clients, gateways and platforms send by habit, and expect to work."""

import concurrent.futures
import re

import openai
import pytest
from starling_agent.openai.app import ERRORS
from starling_agent.openai.messages import ROLES

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "What does len() do?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/v1/models", "/openapi.json"])
def test_head_works_where_get_does(server, path):
    head, got = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", got.headers["content-type"])


def test_head_is_not_possible_where_get_is_not(server):
    assert server.http.head(CHAT).status_code == 405


def test_paths_of_other_platforms_are_served(server):
    assert [server.http.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert server.http.get("/load").json().keys() == {"server_load"}
    assert "tokenizer_class" in server.http.get("/tokenizer_info").json()


def test_codex_alone_gets_its_own_list_of_models(server, tools_server):
    """Codex 0.169 demands the first ten fields; all levels of the template are those of its switch."""
    listed = tools_server.http.get("/v1/models?client_version=0.169.0").json()
    (model,) = listed.pop("models")
    assert listed == tools_server.http.get("/v1/models").json()
    assert "coding agent" in model.pop("base_instructions")
    assert [level.pop("effort") for level in model["supported_reasoning_levels"]] == ["none", "medium"]
    assert all(level.pop("description") and not level for level in model.pop("supported_reasoning_levels"))
    assert model == {
        "slug": "tools",
        "display_name": "tools",
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "support_verbosity": False,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "experimental_supported_tools": [],
        "context_window": listed["data"][0]["max_model_len"],
        "input_modalities": ["text"],
        "apply_patch_tool_type": None,
        "supports_parallel_tool_calls": True,
        "supports_reasoning_summary_parameter": False,
        "default_reasoning_summary": "none",
    }
    models = server.http.get("/v1/models?client_version=1").json()["models"]
    assert [(model["slug"], model["priority"], model["supported_reasoning_levels"]) for model in models] == [
        ("pydoc", 0, []),
        ("org/pydoc", 1, []),
    ]


@pytest.mark.parametrize("headers", [{}, {"Origin": "https://evil.example"}])
def test_a_body_without_a_content_type_is_refused(server, headers):
    """A page of another origin may send one without a preflight."""
    answer = server.http.post(COMPLETION, content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_prompt_that_is_too_long_gets_the_message_that_gateways_look_for(server):
    """LiteLLM looks for it in lower case."""
    for body in ({"prompt": "a" * 5_000_000}, {"prompt": [5] * 5000}, {"prompt": "a", "max_tokens": 100_000}):
        answer = server.http.post(COMPLETION, json=body)
        assert answer.status_code == 400
        assert "this model's maximum context length is" in answer.json()["error"]["message"].lower()


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")],
)
def test_a_conversation_that_is_too_long_gets_the_message_by_which_agents_shorten_it(server, path, field):
    """The expressions are Claude Code's, which reads both numbers, and OpenCode's. LangChain looks for the first words."""
    body = {
        "model": "pydoc",
        "max_output_tokens" if field == "input" else "max_tokens": 5,
        field: [{**USER, "content": "a b " * 5000}],
    }
    answer = server.http.post(path, json=body)
    message = answer.json()["error"]["message"]
    tokens, limit = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message).groups()
    assert int(tokens) > int(limit) == 4095
    assert re.search(r"maximum context length is \d+ tokens", message)


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        (COMPLETION, "prompt", 5000),
        (CHAT, "messages", 5000),
        ("/v1/messages", "messages", 5000),
        ("/v1/responses", "input", 400_000),
        ("/v1/messages/count_tokens", "messages", 400_000),
        (CHAT, "messages", 6_000_000),
    ],
)
def test_a_prompt_that_is_too_long_has_one_code_however_long_it_is(server, path, field, words):
    """A prompt is refused by its tokens, its characters, and what a template writes at most."""
    text = "a b " * words
    body = {field: text if field == "prompt" else [{**USER, "content": text}]}
    answer = server.http.post(path, json=body | ({"max_tokens": 5} if path == "/v1/messages" else {}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded"), error


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"top_logprobs": 0, "logprobs": True},
        {"top_logprobs": 0},
        {"top_logprobs": 0, "logprobs": False},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": CALL["id"], "content": "3"},
                {"role": "user", "content": "Go on"},
            ]
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "Hm"},
                {"role": "tool", "tool_call_id": "call_1", "content": "3"},
                USER,
            ]
        },
    ],
    ids=str,
)
def test_chats_as_agents_send_them_are_accepted(server, extra):
    answer = server.http.post(CHAT, json={"messages": [USER], "max_tokens": 2} | extra)
    assert answer.status_code == 200, answer.text


def test_an_empty_list_of_tools_is_accepted_by_tokenize(server):
    assert server.http.post("/tokenize", json={"messages": [USER], "tools": []}).status_code == 200


def test_polled_routes_are_not_logged(server):
    polls = ("/health", "/ping", "/ready", "/load", "/metrics", "/backend")
    for path in (*polls, "/version"):
        server.http.get(path, headers={"X-Request-Id": f"poll-of-{path}"})
    server.wait_for_line("poll-of-/version")
    assert not any(f"poll-of-{path}" in server.errors for path in polls)


def test_two_requests_with_one_id_get_different_ids_in_their_answers(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(_):
            headers = {"X-Request-Id": "the-same"}
            return client.completions.create(model="pydoc", prompt="a", max_tokens=30, extra_headers=headers).id

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first, second = pool.map(ask, range(2))
    assert first != second


def test_the_page_documents_errors_and_metrics_as_they_are(server):
    page = server.http.get("/openapi.json")
    paths = page.json()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            assert operation["responses"].keys() == {"200", *map(str, ERRORS)}, path
    names = [operation["operationId"] for operations in paths.values() for operation in operations.values()]
    assert len(names) == len(set(names))
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    schemas = page.json()["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", page.text)) <= schemas.keys()
    assert not schemas.keys() & {"HTTPValidationError", "ValidationError"}


def test_the_page_documents_messages_as_agents_send_them(server):
    fields = server.http.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    message = fields["messages"]["items"]
    assert message["required"] == ["role"]
    assert set(message["properties"]["role"]["enum"]) == set(ROLES)
    assert "null" in message["properties"]["content"]["anyOf"][0]["type"]
    call, custom = (each["properties"] for each in message["properties"]["tool_calls"]["items"]["anyOf"])
    assert CALL.keys() <= call.keys() and CALL["function"].keys() <= call["function"]["properties"].keys()
    assert custom["type"] == {"const": "custom"} and custom["custom"]["required"] == ["name", "input"]
    assert "tool_call_id" in message["properties"]
