"""Limits of the endpoint: keys, rates, sizes and origins."""

import concurrent.futures
import json
import socket
import time
from typing import Any

import httpx
import pytest

COMPLETION = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
SLOW = "{% for a in range(20) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def guarded(start_server, tmp_path_factory):
    """A server with all limits except the rate, which would refuse requests of other tests at random."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("# for the team\nfrom-file\n\nother-file\n")
    return start_server(
        "--api-key=first",
        "--api-key=second",
        f"--api-key-file={keys}",
        "--allowed-origins=https://app.example",
        "--max-body-bytes=20KiB",
        "--read-seconds=1",
        "--allowed-hosts=*.example.com",
        "--max-num-seqs=2",
        "--max-num-waiting=2",
        "--kv-cache-memory-bytes=64MiB",
        "--scheduling-policy=priority",
        "--trust-request-chat-template",
        "--enable-log-requests",
        environment={"STARLING_API_KEY": "from-environment,also-there"},
        api_key="first",
    )


def as_user(server: Any, key: str | None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {"Authorization": ""}
    return server.http.get("/v1/models", headers=headers)


@pytest.mark.parametrize("key", ["first", "second", "from-file", "other-file", "from-environment", "also-there"])
def test_each_key_is_accepted(guarded, key):
    assert as_user(guarded, key).status_code == 200


@pytest.mark.parametrize("key", [None, "third", "firs", "first2", "# for the team", "FIRST", "schlüssel".encode().hex()])
def test_any_other_key_is_refused(guarded, key):
    answer = as_user(guarded, key)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_other_schemes_of_authorization_are_refused(guarded):
    for value in ("Basic first", "first", "Bearer"):
        assert guarded.http.get("/v1/models", headers={"Authorization": value}).status_code == 401


def test_a_body_is_not_read_without_a_key(guarded):
    answer = guarded.http.post(COMPLETION, content=b"x" * 10_000_000, headers={"Authorization": ""})
    assert answer.status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"])
def test_probes_need_no_key(guarded, path):
    assert guarded.http.get(path, headers={"Authorization": ""}).status_code == 200


def test_a_body_over_the_limit_gets_413(guarded):
    too_large = b'{"prompt": "' + b"x" * 30_000 + b'"}'
    headers = {"content-type": "application/json"}
    whole = guarded.http.post(COMPLETION, content=too_large, headers=headers)
    in_pieces = guarded.http.post(COMPLETION, content=iter([too_large[:15_000], too_large[15_000:]]), headers=headers)
    for answer in (whole, in_pieces):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_an_incomplete_request_gets_408_after_the_given_time(guarded):
    key = "Authorization: Bearer first\r\n"
    for part in (
        "GET /v1/models HTTP/1.1\r\n",
        f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n",
    ):
        with socket.create_connection((guarded.http.base_url.host, guarded.http.base_url.port)) as client:
            client.sendall(part.encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_two_keys_share_no_cached_prefix(guarded):
    """The time of an answer would reveal prompts of others."""
    prompt = {"prompt": "Whether this was asked before is nobody else's business. " * 4, "max_tokens": 1}

    def cached(key: str, **more: str) -> int:
        answer = guarded.http.post(COMPLETION, json={**prompt, **more}, headers={"Authorization": f"Bearer {key}"})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("first"), cached("second"), cached("from-file")] == [0, 0, 0]
    assert cached("first") > 0 and cached("second") > 0
    assert [cached("first", cache_salt="s"), cached("second", cache_salt="s")] == [0, 0]
    assert cached("first", cache_salt="s") > 0


def test_two_keys_share_no_cached_prefix_of_embeddings(guarded):
    body = {"input": "Nor is it anybody's who only measures the time. " * 4, "pooling": "last"}
    hits = [guarded.metric("vllm:prefix_cache_hits_total")]
    for key in ("first", "second", "second"):
        assert guarded.http.post("/v1/embeddings", json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        guarded.wait_until_idle()
        hits.append(guarded.metric("vllm:prefix_cache_hits_total"))
    assert hits[0] == hits[1] == hits[2] < hits[3]


@pytest.mark.parametrize(
    ("host", "status"),
    [("api.example.com", 200), ("API.Example.com.:8000", 200), ("localhost:1", 200), ("evil.example", 421), ("example.com", 421)],
)
def test_only_listed_hosts_are_answered(guarded, host, status):
    answer = guarded.http.get("/health", headers={"Host": host})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"


def test_scripts_of_allowed_origins_may_call_and_read_errors(guarded):
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST", "Authorization": ""}
    allowed = guarded.http.options(COMPLETION, headers={**preflight, "Access-Control-Request-Headers": "authorization"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    refused = guarded.http.options(COMPLETION, headers={**preflight, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers
    error = guarded.http.get("/v1/models", headers={"Origin": "https://app.example", "Authorization": ""})
    assert error.status_code == 401
    assert error.headers["access-control-allow-origin"] == "https://app.example", "scripts must be able to read errors"


def test_a_full_queue_answers_429_with_retry_after(guarded):
    guarded.wait_until_idle()
    body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: guarded.http.post(COMPLETION, json=body), range(16)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert {answer.status_code for answer in answers} == {200, 429}
    assert len(answers) - len(refused) >= 4, "two run, and two wait"
    for answer in refused:
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    guarded.wait_until_idle()


def test_a_full_queue_refuses_a_stream_before_it_begins(guarded):
    refused = guarded.http.post(COMPLETION, json={"prompt": ["a"] * 8, "max_tokens": 100})
    assert refused.status_code == 400, "more at once than the queue holds: trying again would not help"
    assert "at most" in refused.json()["error"]["message"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        bodies = [{"prompt": "a", "max_tokens": 120, "ignore_eos": True, "stream": True}] * 16
        answers = list(pool.map(lambda body: guarded.http.post(COMPLETION, json=body), bodies))
    assert {answer.status_code for answer in answers} == {200, 429}
    guarded.wait_until_idle()


def test_as_many_chats_fit_as_run_and_wait(guarded):
    """An idle engine accepts them all, however slowly each is rendered."""
    guarded.wait_until_idle()
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template": SLOW}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: guarded.http.post("/v1/chat/completions", json=body), range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4


def test_the_log_has_chats_that_were_refused_before_rendering(guarded):
    guarded.wait_until_idle()
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template": SLOW}

    def send(number: int) -> httpx.Response:
        return guarded.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": f"crowd-{number}-"})

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(send, range(12)))
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "waiting to be rendered" in guarded.wait_for_line('"refused"', refused.headers["X-Request-Id"])


def test_one_request_may_fill_the_whole_queue(guarded):
    guarded.wait_until_idle()
    assert guarded.http.post(COMPLETION, json={**SHORT, "n": 4}).status_code == 200
    refused = guarded.http.post(COMPLETION, json={**SHORT, "n": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_priority_is_accepted_with_the_priority_policy(guarded):
    assert guarded.http.post(COMPLETION, json={**SHORT, "priority": -5}).status_code == 200


def test_logs_are_lines_of_json_without_prompts(guarded):
    headers = {"X-Request-Id": "find-me", "Authorization": "Bearer also-there"}
    answer = guarded.http.post(COMPLETION, json={"prompt": "a secret", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert json.loads(guarded.wait_for_line("find-me", '"request"'))["status"] == 200
    assert json.loads(guarded.wait_for_line("find-me", '"generation"'))["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [({"n": 99}, {"status": 400, "code": "invalid_value", "param": "n"}), ({"model": "none"}, {"status": 404, "param": "model"})],
)
def test_the_line_of_a_refused_request_says_why(guarded, body, said):
    refused = guarded.http.post(COMPLETION, json={**SHORT, **body}, headers={"X-Request-Id": f"refused-{said['status']}-"})
    line = json.loads(guarded.wait_for_line(f"refused-{said['status']}-", '"request"'))
    assert {name: line[name] for name in said} == said
    assert (line["status"], line["code"]) == (refused.status_code, refused.json()["error"]["code"])
    assert "secret" not in guarded.errors


@pytest.mark.parametrize(
    ("method", "headers", "content", "status", "kind"),
    [
        ("POST", {"Authorization": "", "X-Api-Key": "third"}, b"{}", 401, "authentication_error"),
        ("POST", {}, b" " * 30_000, 413, "request_too_large"),
        ("POST", {"Host": "evil.example"}, b"{}", 421, "invalid_request_error"),
        ("POST", {"X-Long": "a" * 33_000}, b"{}", 431, "invalid_request_error"),
        ("GET", {}, b"", 405, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/", "/v1/messages/none"])
def test_anthropics_paths_have_its_form_of_errors_from_every_layer(guarded, path, method, headers, content, status, kind):
    answer = guarded.http.request(method, path, headers={"Content-Type": "application/json", **headers}, content=content)
    error = answer.json()
    if path.endswith("/none") and status == 405:
        status, kind = 404, "not_found_error"
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["request_id"] == answer.headers["x-request-id"]


def test_other_paths_have_openais_form_of_errors(guarded):
    for path in ("/v1/messagesx", COMPLETION):
        error = guarded.http.post(path, headers={"Authorization": ""}).json()
        assert error.keys() == {"error"} and error["error"]["code"] == "invalid_api_key"


def first_refusal(ask):
    """Asks until the limit refuses it: while a machine stands still, another request comes to be allowed."""
    return next(answer for answer in (ask() for _ in range(1000)) if answer.status_code == 429)


def test_each_key_has_its_own_rate_limit(start_server):
    limited = start_server("--api-key=first", "--api-key=second", "--rate-limit=10/5s", "--kv-cache-memory-bytes=64MiB")
    refused = first_refusal(lambda: as_user(limited, "second"))
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    headers = {"X-Api-Key": "second", "Authorization": ""}
    error = first_refusal(lambda: limited.http.post("/v1/messages", json={}, headers=headers)).json()
    assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")
    assert as_user(limited, "first").status_code == 200
    assert limited.http.get("/health").status_code == 200
    deadline = time.monotonic() + 60
    while as_user(limited, "second").status_code != 200:
        assert time.monotonic() < deadline, "requests are accepted again after a wait"
        time.sleep(0.1)
