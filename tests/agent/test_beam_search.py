"""Beam search over HTTP: the sequences of `LLM.beam_search`, which are those of transformers, and requests that end early."""

import concurrent.futures
import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starling_agent.openai.protocol.beam_search import HONOURED, WITH_BEAMS, WITHOUT_EFFECT
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.protocol.completion import CompletionRequest
from starling_agent.openai.protocol.structured_outputs import StructuredOutputFields
from starling_engine import LLM, BeamSearchParams

from tests.agent.conftest import MODEL, REPOSITORY, LiveServer, StartServer
from tests.agent.test_streams import raw_post

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PROMPTS = ["The list", "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello!"]
ENDLESS: dict[str, Any] = {"prompt": "import", "use_beam_search": True, "n": 8, "max_tokens": 3900, "ignore_eos": True}
REFUSED_ALWAYS = {"stream_options", "prompt_logprobs", "allowed_token_ids", "prediction", "repetition_detection"}


@pytest.fixture(scope="module")
def exact(start_server: StartServer) -> LiveServer:
    """Rounds as little as `llm`."""
    return start_server("--dtype=float32", "--kv-cache-memory-bytes=64MiB", "--num-threads=1", "--enable-sleep-mode")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = str(REPOSITORY / MODEL)
    with LLM(model, dtype="float32", kv_cache_memory_bytes=64 << 20, num_threads=1, show_progress=False) as made:
        yield made


def generated(server: LiveServer) -> float:
    return server.metric("vllm:generation_tokens_total")


def wait_for_steps(server: LiveServer, before: float) -> None:
    """Waits until a search of eight beams has begun. Its requests are too short to be seen in the gauges."""
    deadline = time.monotonic() + 60
    while generated(server) < before + 24:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def post(server: LiveServer, path: str, **body: Any) -> Any:
    answer = server.http.post(path, json={"use_beam_search": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (2, 1.0), (4, 0.0), (5, 2.0), (3, -1.0)])
def test_completions_have_the_sequences_of_the_library(width: int, length_penalty: float, exact: LiveServer, llm: LLM) -> None:
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=10, length_penalty=length_penalty))
    body = {"max_tokens": 10, "n": width, "length_penalty": length_penalty, "return_token_ids": True}
    answer = post(exact, COMPLETION, prompt=PROMPTS, **body)
    sequences = [sequence for output in found for sequence in output.sequences]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * width))
    for choice, sequence in zip(answer["choices"], sequences, strict=True):
        assert choice["prompt_token_ids"] + choice["token_ids"] == sequence.tokens
        assert llm.get_tokenizer().decode(choice["prompt_token_ids"]) + choice["text"] == sequence.text
        assert choice["finish_reason"] == sequence.finish_reason
    prompts = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == sum(len(one.tokens) for one in sequences) - width * sum(map(len, prompts))


def test_chats_have_the_sequences_of_the_library(exact: LiveServer, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(tokenizer.render_chat(HELLO), add_special_tokens=False)
    (found,) = llm.beam_search([ids], BeamSearchParams(beam_width=3, max_tokens=12))
    answer = post(exact, CHAT, messages=HELLO, n=3, max_tokens=12, return_token_ids=True)
    assert [ids + choice["token_ids"] for choice in answer["choices"]] == [one.tokens for one in found.sequences]
    assert [tokenizer.decode(ids) + choice["message"]["content"] for choice in answer["choices"]] == [
        one.text for one in found.sequences
    ]


def test_openais_client_gets_the_best_first(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        extra = {"use_beam_search": True, "length_penalty": 0.5}
        answer = client.completions.create(model="pydoc", prompt="A list", n=4, max_tokens=8, logprobs=2, extra_body=extra)
        chat = client.chat.completions.create(
            model="pydoc", messages=HELLO, n=2, max_tokens=8, logprobs=True, top_logprobs=3, extra_body=extra
        )
    listed = [choice.logprobs.token_logprobs for choice in answer.choices]
    scores = [sum(logprobs) / len(logprobs) ** 0.5 for logprobs in listed]
    assert scores == sorted(scores, reverse=True)
    assert answer.usage.completion_tokens == sum(map(len, listed))
    assert all(len(row) in (2, 3) for choice in answer.choices for row in choice.logprobs.top_logprobs)
    assert all(len(entry.top_logprobs) == 3 for choice in chat.choices for entry in choice.logprobs.content)


def test_a_wide_search_finds_nothing_worse_than_the_greedy_output(server: LiveServer) -> None:
    def score(**body: Any) -> float:
        body = {"prompt": "import os", "max_tokens": 8, "ignore_eos": True, "logprobs": 0, **body}
        return sum(server.http.post(COMPLETION, json=body).json()["choices"][0]["logprobs"]["token_logprobs"])

    assert score(use_beam_search=True, n=8) >= score(temperature=0, repetition_penalty=1) - 0.05


def test_a_chat_without_a_limit_ends_when_nothing_better_is_possible(server: LiveServer) -> None:
    answer = post(server, CHAT, messages=HELLO, n=2, length_penalty=0)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0},
        {"seed": 7, "speculative": False, "early_stopping": "never", "length_penalty": 1},
        {"stop": [], "stop_token_ids": [], "logit_bias": {}, "min_tokens": 0, "bad_words": [], "stream": False, "best_of": 2},
    ],
    ids=str,
)
def test_values_without_effect_are_accepted(extra: dict[str, Any], server: LiveServer) -> None:
    plain = {"prompt": "A list", "n": 2, "max_tokens": 4}
    assert post(server, COMPLETION, **plain, **extra)["choices"] == post(server, COMPLETION, **plain)["choices"]


@pytest.mark.parametrize("extra", [{"use_beam_search": False}, {"length_penalty": 1}, {"early_stopping": False}], ids=str)
def test_values_without_effect_are_accepted_without_beams(extra: dict[str, Any], server: LiveServer) -> None:
    assert server.http.post(COMPLETION, json={"prompt": "a", "max_tokens": 1, **extra}).status_code == 200


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_each_field_is_decided_on(model: type[CompletionRequest | ChatRequest]) -> None:
    """Add a new field to one of the four, and a test of what it does to a search. Those of a form are decided on as one."""
    others = model.model_fields.keys() - StructuredOutputFields.model_fields.keys()
    assert others - HONOURED - WITHOUT_EFFECT - WITH_BEAMS.keys() <= REFUSED_ALWAYS


def test_a_text_format_has_no_effect(server: LiveServer) -> None:
    asked = {"prompt": "A list", "n": 2, "max_tokens": 3}
    assert (
        post(server, COMPLETION, **asked, response_format={"type": "text"})["choices"]
        == post(server, COMPLETION, **asked)["choices"]
    )


def test_a_prompt_is_echoed(server: LiveServer) -> None:
    plain, echoed = (post(server, COMPLETION, prompt="A list", n=2, max_tokens=4, echo=echo) for echo in (False, True))
    assert [choice["text"] for choice in echoed["choices"]] == ["A list" + choice["text"] for choice in plain["choices"]]


def test_a_search_is_counted_with_its_outputs_and_no_time_between_tokens(server: LiveServer) -> None:
    names = [f"vllm:{name}_count" for name in ("e2e_request_latency_seconds", "request_time_per_output_token_seconds")]
    server.wait_until_idle()
    before = [server.metric(name) for name in names]
    answer = post(server, COMPLETION, prompt="A list", n=3, max_tokens=5)
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [1, 0]
    assert answer["usage"]["completion_tokens"] <= 15


def test_a_disconnect_ends_all_requests_of_a_search(server: LiveServer) -> None:
    server.wait_until_idle()
    before = generated(server)
    with contextlib.closing(raw_post(server, COMPLETION, ENDLESS)):
        wait_for_steps(server, before)
    server.wait_until_idle()
    sampled = generated(server)
    assert sampled - before < ENDLESS["n"] * ENDLESS["max_tokens"] / 2
    time.sleep(1.5)  # counters may be a ping old
    assert generated(server) == sampled


def test_a_search_ends_with_an_error_when_the_engine_is_put_to_sleep(exact: LiveServer) -> None:
    before = generated(exact)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        searching = pool.submit(exact.http.post, COMPLETION, json=ENDLESS)
        wait_for_steps(exact, before)
        assert exact.http.post("/sleep?mode=abort").json() == {"is_sleeping": True}
        answer = searching.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_asleep")
    assert exact.http.post("/wake_up").json() == {"is_sleeping": False}


def test_a_search_finishes_while_the_server_drains(start_server: StartServer) -> None:
    server = start_server("--accept-seconds=0", "--kv-cache-memory-bytes=64MiB")
    before = generated(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        searching = pool.submit(server.http.post, COMPLETION, json={**ENDLESS, "max_tokens": 60})
        wait_for_steps(server, before)
        server.signal(signal.SIGTERM)
        answer = searching.result(60)
    assert answer.status_code == 200
    assert [len(choice["text"]) > 0 for choice in answer.json()["choices"]] == [True] * 8
    assert server.wait_for_exit() == 0


def test_the_api_page_has_the_fields(server: LiveServer) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        assert {"type": "boolean"} in fields["use_beam_search"]["anyOf"]
        assert {"type": "number"} in fields["length_penalty"]["anyOf"]
        assert {"enum": [False, "never"]} in fields["early_stopping"]["anyOf"]
