"""Budgets of reasoning over HTTP, with a model whose tokenizer has tokens that mark it, and whose prompts open it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.agent.conftest import MODEL, REPOSITORY, LiveServer, StartServer

QUESTION = [{"role": "user", "content": "What does len() do?"}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n"
)


KIMI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{{ '<|open|>' + 'think' + '<|sep|>' }}"
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if thinking_budget is defined %}{{ thinking_budget }} tokens{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Channels, with a variable that Seed-OSS has."""
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")


def model_with_marks(folder: Path, template: str, *marks: str) -> str:
    """Makes the repository's model one whose youngest tokens have become marks. It reasons until its tokens are spent."""
    shutil.copytree(REPOSITORY / MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    model, ids = tokenizer["model"], dict(zip(marks, range(4096 - len(marks), 4096), strict=True))
    model["vocab"] = {text: token for text, token in model["vocab"].items() if token not in ids.values()}
    model["merges"] = model["merges"][: -len(marks)]
    for text, token in ids.items():
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": token, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.fixture(scope="module")
def thinker(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    model = model_with_marks(tmp_path_factory.mktemp("model") / "thinker", TEMPLATE, "<think>", "</think>")
    return start_server("--served-model-name=thinker", "--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", model=model)


@pytest.fixture(scope="module")
def kimi(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """A model whose marks are pieces, as Kimi K3's, with drafts."""
    model = model_with_marks(tmp_path_factory.mktemp("model") / "kimi", KIMI, "<|open|>", "<|close|>", "<|sep|>")
    flags = ("--served-model-name=kimi", "--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", "--spec-method=ngram")
    return start_server(*flags, model=model)


@pytest.fixture(scope="module")
def channels(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    model = model_with_marks(tmp_path_factory.mktemp("model") / "channels", GPT_OSS, *CHANNELS)
    flags = ("--served-model-name=channels", "--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", "--tool-call-parser=openai")
    return start_server(*flags, "--reasoning-parser=openai", model=model)


@pytest.fixture(scope="module")
def client(thinker: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, budget: int | None, **fields: Any) -> tuple[str | None, str | None, list[int]]:
    extra = {"thinking_token_budget": budget, "return_token_ids": True}
    settings = {"model": "thinker", "messages": QUESTION, "max_tokens": 40, "temperature": 0, "extra_body": extra, **fields}
    choice = client.chat.completions.create(**settings).choices[0]
    return getattr(choice.message, "reasoning", None), choice.message.content, choice.token_ids


@pytest.mark.parametrize("budget", [0, 1, 17])
def test_reasoning_ends_behind_its_budget_and_the_answer_goes_on(client, budget):
    _, nothing, free = chat(client, None)
    assert 4095 not in free and not nothing, "or this shows nothing"
    reasoning, content, tokens = chat(client, budget)
    assert tokens[:budget] == free[:budget] and tokens[budget] == 4095
    assert bool(reasoning) == bool(budget) and content


@pytest.mark.parametrize("budget", [0, 1, 17])
def test_a_mark_of_several_tokens_ends_reasoning_behind_its_budget(kimi, budget):
    body = {"messages": QUESTION, "max_tokens": 60, "temperature": 0, "return_token_ids": True}
    ask = lambda **fields: kimi.http.post("/v1/chat/completions", json={**body, **fields})  # noqa: E731
    think = kimi.http.post("/tokenize", json={"prompt": "think"}).json()["tokens"]
    free = ask().json()["choices"][0]
    assert 4094 not in free["token_ids"] and not free["message"]["content"], "or this shows nothing"
    found = [ask(thinking_token_budget=budget, **fields).json()["choices"][0] for fields in ({}, {"speculative": False})]
    for choice in found:
        tokens = choice["token_ids"]
        assert tokens[:budget] == free["token_ids"][:budget]
        assert tokens[budget : budget + len(think) + 2] == [4094, *think, 4095]
        assert bool(choice["message"].get("reasoning")) == bool(budget) and choice["message"]["content"]
    assert found[0]["token_ids"] == found[1]["token_ids"], "drafts change nothing"
    lines = ask(thinking_token_budget=budget, stream=True).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    for part in ("reasoning", "content"):
        assert "".join(delta.get(part) or "" for delta in deltas) == (found[0]["message"].get(part) or "")


def test_a_form_follows_the_reasoning(client):
    schema = {"name": "n", "schema": {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}}
    form = {"type": "json_schema", "json_schema": schema}
    reasoning, content, tokens = chat(client, 5, response_format=form, max_tokens=60)
    assert reasoning and tokens[5] == 4095
    assert json.loads(content)["n"] == 7


def test_many_at_once_each_have_their_own(client):
    answer = client.completions.create(
        model="thinker", prompt=["<think>\nThe", "No thoughts", "<think>\nA"] * 4, max_tokens=20, temperature=0,
        extra_body={"thinking_token_budget": 6, "return_token_ids": True, "skip_special_tokens": False},
    )  # fmt: skip
    for choice in answer.choices:
        assert (choice.token_ids[6] == 4095) == (choice.index % 3 != 1)


def test_anthropics_clients_set_it_by_their_own_name(thinker):
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 7}
        message = client.messages.create(model="thinker", max_tokens=40, messages=QUESTION, thinking=thinking)
        assert [block.type for block in message.content] == ["thinking", "text"]
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
            client.messages.create(
                model="thinker", max_tokens=40, messages=QUESTION, thinking={"type": "enabled", "budget_tokens": -1}
            )


def test_openrouters_object_says_the_same(client, thinker):
    usage = client.chat.completions.create(
        model="thinker",
        messages=QUESTION,
        max_tokens=30,
        temperature=0,
        extra_body={"reasoning": {"max_tokens": 9, "exclude": True, "summary": "auto"}},
    )
    assert usage.usage.completion_tokens_details.reasoning_tokens == pytest.approx(9, abs=1)
    assert not hasattr(usage.choices[0].message, "reasoning")
    stream = client.chat.completions.create(
        model="thinker", messages=QUESTION, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True},
        extra_body={"reasoning": {"max_tokens": 9}},
    )  # fmt: skip
    assert [*stream][-1].usage.completion_tokens_details.reasoning_tokens == pytest.approx(9, abs=1)
    for given, param in (
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),  # the template has no levels
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 1}, "thinking_token_budget": 1}, "reasoning.max_tokens"),
        ({"reasoning": {"depth": 1}}, "reasoning.depth"),
    ):
        answer = thinker.http.post("/v1/chat/completions", json={"messages": QUESTION, **given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("fields", [{"thinking_token_budget": -1}, {"thinking_token_budget": 1, "use_beam_search": True, "n": 2}])
def test_impossible_budgets_are_refused(thinker, fields):
    answer = thinker.http.post("/v1/chat/completions", json={"messages": QUESTION, "temperature": 0, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_a_model_without_marks_has_no_budget_but_takes_anthropics_hint(http):
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "thinking_token_budget": 5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
    thinking = {"type": "enabled", "budget_tokens": 5}
    answer = http.post("/v1/messages", json={"model": "pydoc", "max_tokens": 4, "messages": QUESTION, "thinking": thinking})
    assert answer.status_code == 200, answer.text


GOES_ON: dict[str, Any] = {
    "messages": [*QUESTION, {"role": "assistant", "content": "As JSON: "}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}


def test_a_message_goes_on_in_its_channel(channels):
    """A form that would need another channel, which the message cannot begin, is refused."""
    form = {"json": {"const": "<|end|>"}}
    answer = channels.http.post("/v1/chat/completions", json={**GOES_ON, "structured_outputs": form}).json()
    assert answer["choices"][0]["message"]["content"] == '"<|end|>"' and answer["choices"][0]["finish_reason"] == "stop"
    tool = {"type": "function", "function": {"name": "f"}}
    for fields, param in [
        ({"structured_outputs": {**form, "reasoning": True}}, "structured_outputs.reasoning"),
        ({"tools": [tool], "tool_choice": "required"}, "tool_choice"),
    ]:
        answer = channels.http.post("/v1/chat/completions", json={**GOES_ON, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_choice_writes_no_headers(channels):
    """Without reasoning it is content, of which special tokens are not shown."""
    form = {"choice": ["<|channel|>commentary<|message|>No."], "reasoning": False}
    answer = channels.http.post("/v1/chat/completions", json={"messages": QUESTION, "structured_outputs": form}).json()
    assert answer["choices"][0]["message"]["content"] == "commentaryNo."


def test_the_template_is_told_the_budget(channels):
    def shown(**fields: Any) -> str:
        body = {"messages": QUESTION, "max_tokens": 1, "return_token_ids": True, **fields}
        answer = channels.http.post("/v1/chat/completions", json=body).json()
        return channels.http.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]

    assert "7 tokens" in shown(thinking_token_budget=7) and "7 tokens" in shown(reasoning={"max_tokens": 7})
    assert "tokens" not in shown()
    assert ">0 tokens" in shown(thinking_token_budget=7, reasoning_effort="none")
    assert "5 tokens" in shown(thinking_token_budget=7, chat_template_kwargs={"thinking_budget": 5})
