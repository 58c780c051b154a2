"""OpenAI's official client, as programs use it."""

import math
from collections.abc import Iterator

import openai
import pytest

QUESTION = [{"role": "user", "content": "What does len() do?"}]


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models_are_listed_under_their_names(client):
    assert [model.id for model in client.models.list()] == ["pydoc", "org/pydoc"]
    assert client.models.retrieve("org/pydoc").id == "org/pydoc"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_a_chat_is_answered_in_openais_form(client):
    answer = client.chat.completions.create(model="pydoc", messages=QUESTION, max_completion_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == "pydoc"
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_templates_variable_that_it_does_not_read_is_named(client):
    for name in ("self", "cls", "variables"):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(
                model="pydoc", messages=QUESTION, max_tokens=4, extra_body={"chat_template_kwargs": {name: 1}}
            )
        assert error.value.param == f"chat_template_kwargs.{name}"


def test_a_streamed_chat_is_the_same_as_a_whole_one(client):
    settings = {"model": "pydoc", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finish = chunks[-2].choices[0]
    assert finish.finish_reason == whole.choices[0].finish_reason
    assert finish.delta.model_dump(exclude_none=True) == {}, "the finish chunk has an empty delta"
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_the_clients_stream_helper_works(client):
    with client.chat.completions.stream(model="pydoc", messages=QUESTION, max_tokens=8) as stream:
        stream.until_done()
        assert stream.current_completion_snapshot.choices[0].message.content


def test_every_chunk_has_usage_if_wanted(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="pydoc", prompt="def", max_tokens=6, stream=True, stream_options=options, extra_body={"ignore_eos": True}
        )
    )
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_a_prediction_changes_the_speed_alone_and_is_counted(client):
    settings = {"model": "pydoc", "messages": QUESTION, "max_tokens": 24, "temperature": 1.0, "seed": 5}
    plain = client.chat.completions.create(**settings)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details is None
    for content in (text, [{"type": "text", "text": text}], "another text"):
        prediction = {"type": "content", "content": content}
        predicted = client.chat.completions.create(**settings, prediction=prediction)
        assert predicted.choices[0].message.content == text
        details = predicted.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens > 0) == (content != "another text")
        chunks = client.chat.completions.create(
            **settings, prediction=prediction, stream=True, stream_options={"include_usage": True}
        )
        assert [*chunks][-1].usage.completion_tokens_details is not None


def test_a_seed_repeats_an_answer(client):
    def once(seed: int) -> str:
        answer = client.chat.completions.create(model="pydoc", messages=QUESTION, max_tokens=24, temperature=1.5, seed=seed)
        return answer.choices[0].message.content

    assert once(7) == once(7)
    assert len({once(seed) for seed in range(4)}) > 1


def test_a_chat_has_several_choices(client):
    answer = client.chat.completions.create(
        model="pydoc", messages=QUESTION, max_tokens=8, n=3, temperature=1.5, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 24
    chunks = client.chat.completions.create(model="pydoc", messages=QUESTION, max_tokens=8, n=3, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2}


def test_a_repeated_prompt_is_cached(client):
    messages = [{"role": "user", "content": "Tell me about " + "lists and tuples and " * 20}]
    first = client.chat.completions.create(model="pydoc", messages=messages, max_tokens=1)
    second = client.chat.completions.create(model="pydoc", messages=messages, max_tokens=1)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    salted = client.chat.completions.create(model="pydoc", messages=messages, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stop_string_ends_the_text_before_it(client):
    settings = {"model": "pydoc", "prompt": "import os\nimport", "max_tokens": 60, "temperature": 0}
    free = client.completions.create(**settings).choices[0].text
    stop = free.strip()[2:5]
    cut = client.completions.create(**settings, stop=[stop, "never here"]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.model_extra["stop_reason"] == stop
    assert free.startswith(cut.text)
    assert stop not in cut.text
    kept = client.completions.create(**settings, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text.endswith(stop)


def test_a_chat_has_log_probabilities(client):
    settings = {"model": "pydoc", "messages": QUESTION, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**settings, extra_body={"repetition_penalty": 1.0}).choices[0]
    entries = whole.logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the likeliest"
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert entry.logprob <= 0
    chunks = client.chat.completions.create(**settings, extra_body={"repetition_penalty": 1.0}, stream=True)
    streamed = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in entries]


def test_several_prompts_are_completed_in_one_request(client):
    answer = client.completions.create(model="pydoc", prompt=["import", "class", "def"], max_tokens=4, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    chunks = client.completions.create(model="pydoc", prompt=["import", "class"], max_tokens=4, stream=True)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert all(texts.values())


def test_prompts_may_be_token_ids(client, http):
    ids = http.post("/tokenize", json={"prompt": "The list type"}).json()["tokens"]
    settings = {"model": "pydoc", "max_tokens": 6, "temperature": 0}
    as_text = client.completions.create(**settings, prompt="The list type").choices[0].text
    assert client.completions.create(**settings, prompt=ids).choices[0].text == as_text
    both = client.completions.create(**settings, prompt=[ids, ids])
    assert [choice.text for choice in both.choices] == [as_text, as_text]


def test_echo_with_logprobs_scores_the_prompt(client):
    prompt = "A list is a sequence"
    answer = client.completions.create(model="pydoc", prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == prompt
    assert answer.usage.completion_tokens == 0
    table = choice.logprobs
    assert "".join(table.tokens) == prompt
    assert table.token_logprobs[0] is None, "nothing precedes the first token"
    assert all(math.isfinite(value) and value <= 0 for value in table.token_logprobs[1:])
    assert table.text_offset == [prompt.index(token, offset) for token, offset in zip(table.tokens, table.text_offset, strict=True)]


def test_echo_is_streamed_too(client):
    settings = {"model": "pydoc", "prompt": "for i in", "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 1}
    whole = client.completions.create(**settings).choices[0]
    chunks = list(client.completions.create(**settings, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.text
    offsets = [o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset


def test_logit_bias_and_bad_words_change_the_token(client, http):
    settings = {"model": "pydoc", "prompt": "import os\nimport", "max_tokens": 1, "temperature": 0}
    free = client.completions.create(**settings, logprobs=1).choices[0].logprobs.tokens[0]
    token = http.post("/tokenize", json={"prompt": free, "add_special_tokens": False}).json()["tokens"]
    assert len(token) == 1
    biased = client.completions.create(**settings, logit_bias={str(token[0]): -100}, logprobs=1).choices[0]
    assert biased.logprobs.tokens[0] != free
    banned = client.completions.create(**settings, logprobs=1, extra_body={"bad_words": [free.strip()]}).choices[0]
    assert banned.logprobs.tokens[0] != free
    forced = client.completions.create(**settings, logprobs=1, extra_body={"allowed_token_ids": [300]}).choices[0]
    assert forced.logprobs.tokens[0] == http.post("/detokenize", json={"tokens": [300]}).json()["prompt"]


def test_embeddings_are_unit_vectors(client):
    texts = ["a list of numbers", "a list of numbers", "the network is unreachable"]
    answer = client.embeddings.create(model="pydoc", input=texts)
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert all(abs(sum(x * x for x in v) - 1) < 1e-3 for v in vectors)
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[1], strict=True)) < 1e-2
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    plain = client.embeddings.create(model="pydoc", input=texts[2], encoding_format="float").data[0].embedding
    assert max(abs(a - b) for a, b in zip(plain, vectors[2], strict=True)) < 1e-2
    assert len(client.embeddings.create(model="pydoc", input=[5, 6, 7]).data) == 1
    assert len(client.embeddings.create(model="pydoc", input=[[5, 6], [7]]).data) == 2


def test_an_answer_may_be_sent_back_in_the_history(client):
    first = client.chat.completions.create(model="pydoc", messages=QUESTION, max_tokens=4)
    history = [*QUESTION, first.choices[0].message.model_dump(), {"role": "user", "content": [{"type": "text", "text": "And?"}]}]
    assert client.chat.completions.create(model="pydoc", messages=history, max_tokens=4).choices[0].message.content is not None


def test_the_last_message_can_be_continued(client):
    messages = [*QUESTION, {"role": "assistant", "content": "The function"}]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    settings = {"model": "pydoc", "messages": messages, "max_tokens": 5, "temperature": 0}
    plain = client.chat.completions.create(**settings, extra_body=extra).choices[0].message.content
    echoed = client.chat.completions.create(**settings, extra_body={**extra, "echo": True}).choices[0].message.content
    assert echoed == "The function" + plain


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="pydoc", messages=QUESTION, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="pydoc", messages=QUESTION, stream=True, tools=[{"type": "function"}])
    assert error.value.param == "tools[0].function"
