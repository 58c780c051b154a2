"""A stream that goes on elsewhere after any of its tokens: the rest is what would have come, and what came is not said again."""

import hmac
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from starling_agent.contract.router import PROOF_PATH, ROUTER_TOKEN
from starling_agent.file_token import FileToken
from starling_agent.openai.stream_record import RESUMABLE, RESUME_TYPE
from starling_engine.errors import ConfigError
from starling_router.noted_stream import NotedStream

from tests.agent.conftest import MODEL, REPOSITORY, TOOLS_TEMPLATE, LiveServer, StartServer
from tests.agent.resumed import CHAT, COMPLETION, HEADERS, MESSAGES, TOKEN, joined, noted
from tests.agent.test_tools import SEARCH, TWO, WEATHER

ASKED = [{"role": "user", "content": "How do I read a file?"}]
USAGE = {"stream_options": {"include_usage": True}}
THINGS = {"type": "object", "properties": {"name": {"type": "string", "minLength": 20}}, "required": ["name"]}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CALLS = {"tools": [WEATHER, SEARCH], "structured_outputs": {"choice": [TWO]}, "max_tokens": 200}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy chat": (CHAT, {"messages": ASKED, "temperature": 0, **USAGE}),
    "sampled chat": (CHAT, {"messages": ASKED, "temperature": 1, "seed": 7, "min_tokens": 20}),
    "sampled chat without a seed": (CHAT, {"messages": ASKED, "temperature": 1, "min_tokens": 20}),
    "penalties": (CHAT, {"messages": ASKED, "temperature": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    "chat with log probabilities": (CHAT, {"messages": ASKED, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    "several choices": (CHAT, {"messages": ASKED, "n": 3, "temperature": 1.5, "max_tokens": 12, **COUNTED}),
    "calls": (CHAT, {"messages": ASKED, **CALLS, **USAGE}),
    "one schema": (
        CHAT,
        {"messages": ASKED, "structured_outputs": {"json": THINGS}, "temperature": 1, "seed": 1, "max_tokens": 60},
    ),
    "a stop string": (COMPLETION, {"prompt": "def ", "stop": ["return", "\n\n\n"], "max_tokens": 80, "temperature": 0, **USAGE}),
    "a short echo": (COMPLETION, {"prompt": "import os", "echo": True, "temperature": 1, "min_tokens": 20}),
    "log probabilities": (COMPLETION, {"prompt": "import os", "logprobs": 2, "temperature": 1, "min_tokens": 20}),
    "several prompts": (
        COMPLETION,
        {"prompt": ["import os", "class A", "import os"], "n": 2, "temperature": 1, "max_tokens": 8, **USAGE},
    ),
    "messages": (MESSAGES, {"messages": ASKED, "temperature": 1}),
    "messages with calls": (MESSAGES, {"messages": ASKED, "structured_outputs": {"choice": [TWO]}, "max_tokens": 200}),
}


@pytest.fixture(scope="module")
def router_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture(scope="module")
def resuming(start_server: StartServer, router_token: Path, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    folder = tmp_path_factory.mktemp("model") / "tools"
    shutil.copytree(REPOSITORY / MODEL, folder)
    for file in folder.glob("chat_template*"):
        file.unlink()
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    flags = (
        "--dtype=float32",
        "--served-model-name=tools",
        "--kv-cache-memory-bytes=64MiB",
        "--reasoning-parser=qwen3",
        f"--router-token-file={router_token}",
    )
    return start_server(*flags, model=str(folder))


MOST_CUTS = 5
"""So many of a stream's cuts run without --whole: the first, the last, and some between."""


@pytest.mark.parametrize("name", CASES)
def test_the_rest_follows_after_every_cut(resuming: LiveServer, name: str, request: pytest.FixtureRequest) -> None:
    path, body = CASES[name]
    body = {"max_tokens": 30, "stream": True, **body}
    parts: list[tuple[bytes, bytes]] = []
    while len(parts) <= 5:  # on a busy machine a few writes may have all of a stream
        parts = noted(resuming.http, path, body)
    whole = joined(b"".join(events for events, _ in parts))
    cuts = range(len(parts))
    if not request.config.getoption("--whole"):
        cuts = sorted({round(at * (len(parts) - 1) / MOST_CUTS) for at in range(MOST_CUTS + 1)})
    for cut in cuts:
        rest = noted(resuming.http, path, body, [note for _, note in parts[:cut]])
        events = [events for events, _ in parts[:cut] + rest]
        found = joined(b"".join(events))
        if not cut:
            continue  # a new answer: it has another id, and perhaps another seed
        assert found == whole, f"after {cut} of {len(parts)} parts"
    resuming.wait_until_idle()


def test_a_stream_that_was_resumed_is_resumed_again(resuming: LiveServer) -> None:
    path, body = CHAT, {"messages": ASKED, "temperature": 1, "n": 2, "max_tokens": 30, "stream": True, **USAGE}
    parts = noted(resuming.http, path, body)
    whole = joined(b"".join(events for events, _ in parts))
    seen = parts[:1]
    while joined(b"".join(events for events, _ in seen))["order"] != whole["order"]:
        seen += noted(resuming.http, path, body, [note for _, note in seen])[:2]
    assert joined(b"".join(events for events, _ in seen)) == whole
    assert sum(b'"seeds"' in note for _, note in seen) == 1


@pytest.mark.parametrize("headers", [{}, {RESUMABLE: "yes"}, {**HEADERS, ROUTER_TOKEN: "another one"}, {ROUTER_TOKEN: TOKEN}])
def test_notes_are_for_routers_alone(resuming: LiveServer, headers: dict[str, str]) -> None:
    body = json.dumps({"model": "tools", "prompt": "a", "stream": True, "max_tokens": 3})
    plain = resuming.http.post(COMPLETION, content=body, headers={"content-type": "application/json", **headers})
    assert plain.status_code == 200 and b": note" not in plain.content and RESUMABLE not in plain.headers
    resumed = resuming.http.post(COMPLETION, content=f"[]\n{body}", headers={"content-type": RESUME_TYPE, **headers})
    assert resumed.status_code == 415
    assert resumed.json()["error"]["code"] == "unsupported_media_type"


def test_a_server_proves_that_it_knows_the_token_and_needs_no_key_for_it(resuming: LiveServer, server: LiveServer) -> None:
    nonce = "0123456789abcdef"
    proofs = [each.http.get(PROOF_PATH, params={"nonce": nonce}).json()["proof"] for each in (resuming, server)]
    assert proofs == [hmac.new(TOKEN.encode(), b"proof\0" + nonce.encode(), "sha256").hexdigest(), ""]
    assert resuming.http.get(PROOF_PATH, params={"nonce": "short"}).json()["error"]["param"] == "nonce"


def test_a_server_without_a_token_believes_nobody(server: LiveServer) -> None:
    answer = server.http.post(COMPLETION, content='[]\n{"prompt": "a"}', headers={**HEADERS, "content-type": RESUME_TYPE})
    assert answer.status_code == 415


def test_streams_with_scores_of_the_prompt_have_no_notes(resuming: LiveServer) -> None:
    body = {"prompt": "a", "echo": True, "logprobs": 1, "stream": True, "max_tokens": 20}
    answer = resuming.http.post(COMPLETION, json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert b": note" not in answer.content and RESUMABLE not in answer.headers


@pytest.mark.parametrize("background", [False, True])
def test_notes_of_responses_count_their_tokens(resuming: LiveServer, background: bool) -> None:
    body = {"model": "tools", "input": "a", "stream": True, "max_output_tokens": 20, "background": background}
    answer = resuming.http.post("/v1/responses", json=body, headers=HEADERS)
    assert answer.status_code == 200 and answer.headers[RESUMABLE] == "counted"
    stream = NotedStream()
    events = stream.take(answer.content)
    usage = json.loads(events.rpartition(b"\ndata: ")[2])["response"]["usage"]
    assert stream.is_complete and stream.tokens == usage["output_tokens"] > 1
    assert b": note" not in resuming.http.post("/v1/responses", json=body).content


@pytest.mark.parametrize(
    "notes",
    [
        "{}",
        "[{}]",
        '[{"gains": [[1, [5]]]}]',
        '[{"gains": [[-1, [5]]]}]',
        '[{"gains": [[0, [9999999]]]}]',
        '[{"gains": [[0, [5]]], "stream": {"id": "a", "created": 1, "seeds": [1, 2]}}]',
    ],
)
def test_notes_of_another_request_are_refused(resuming: LiveServer, notes: str) -> None:
    content = notes + '\n{"model": "tools", "prompt": "a", "stream": true}'
    answer = resuming.http.post(COMPLETION, content=content, headers={**HEADERS, "content-type": RESUME_TYPE})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "notes"


@pytest.mark.parametrize("unnamed", [{}, {"model": None}])
def test_a_stream_that_began_when_the_model_could_be_left_out_is_resumed(resuming: LiveServer, unnamed: dict[str, None]) -> None:
    body = {"prompt": "import os", "stream": True, "max_tokens": 80, "ignore_eos": True, "temperature": 0}
    parts = noted(resuming.http, COMPLETION, body)
    for cut, status in ((0, 400), (1, 200)):
        notes = b"[" + b",".join(note for _, note in parts[:cut]) + b"]\n"
        content = notes + json.dumps(body | unnamed).encode()
        answer = resuming.http.post(COMPLETION, content=content, headers={**HEADERS, "content-type": RESUME_TYPE})
        assert answer.status_code == status, answer.text
    assert b'"model":"tools"' in answer.content


def test_what_was_streamed_elsewhere_is_not_counted_again(resuming: LiveServer) -> None:
    body = {"prompt": "import os", "stream": True, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    parts = noted(resuming.http, COMPLETION, body)
    notes = [note for _, note in parts[: len(parts) // 2]]
    streamed = sum(len(tokens) for note in notes for _, tokens in json.loads(note)["gains"])
    before = resuming.metric("vllm:request_generation_tokens_sum")
    noted(resuming.http, COMPLETION, body, notes)
    assert streamed and resuming.metric("vllm:request_generation_tokens_sum") - before == 20 - streamed


@pytest.mark.parametrize("content", [None, "", " \n", "two\nlines", "schlüssel"])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="one line of printable ASCII") as caught:
        FileToken.required(tmp_path / "token", "router_token_file")
    assert caught.value.field == "router_token_file"


def test_a_token_changes_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    token = FileToken.required(tmp_path / "token", "router_token_file")
    assert token.matches(b"one") and not token.matches(b"two") and not token.matches(b"")
    (tmp_path / "token").write_text("the second\n")
    assert token.matches(b"the second") and not token.matches(b"one")
    (tmp_path / "token").unlink()
    assert not token.matches(b"the second") and not token.matches(b"")


def test_a_token_that_is_missing_is_said_once_for_each_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token, missing = FileToken(tmp_path / "token"), "the token cannot be read"
    assert not any(token.matches(b"one") for _ in range(3))
    assert capsys.readouterr().out.count(missing) == 1
    (tmp_path / "token").write_text("one")
    assert token.matches(b"one")
    (tmp_path / "token").unlink()
    assert not any(token.matches(b"one") for _ in range(3))
    assert capsys.readouterr().out.count(missing) == 1
