"""`repetition_detection` over HTTP: an output that repeats itself ends, and says why."""

import json

import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "Hello"}]}, COMPLETION: {"prompt": "Hello"}}
COUNT = 4
LOOP = {"max_tokens": 40, "temperature": 0, "allowed_token_ids": [300]}
"""Settings with which an output is one token, again and again."""
DETECTION = {"max_pattern_size": 8, "min_count": COUNT}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_output_that_repeats_itself_ends(server, http, path):
    ended = server.metric('vllm:request_success_total{[^}]*finished_reason="repetition"[^}]*}')
    answer = http.post(path, json={**PROMPTS[path], **LOOP, "repetition_detection": DETECTION}).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert answer["usage"]["completion_tokens"] == COUNT
    text = choice["text"] if path == COMPLETION else choice["message"]["content"]
    assert text == http.post("/detokenize", json={"tokens": [300] * COUNT}).json()["prompt"]
    assert server.metric('vllm:request_success_total{[^}]*finished_reason="repetition"[^}]*}') == ended + 1


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_its_stream_ends_too(http, path):
    body = {**PROMPTS[path], **LOOP, "repetition_detection": DETECTION, "stream": True}
    events = [line.removeprefix("data: ") for line in http.post(path, json=body).text.split("\n") if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")


@pytest.mark.parametrize(
    "detection", [None, {}, {"max_pattern_size": 0, "min_count": COUNT}, {"max_pattern_size": 8, "min_count": 50}]
)
def test_without_it_the_output_goes_on(http, detection):
    answer = http.post(COMPLETION, json={**PROMPTS[COMPLETION], **LOOP, "repetition_detection": detection}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == LOOP["max_tokens"]
