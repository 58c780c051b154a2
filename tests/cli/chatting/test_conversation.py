"""Tests what a conversation sends, and what is left of a turn that failed."""

import pytest
from starling_cli.chatting.client import AnswerError, ChatClient
from starling_cli.chatting.conversation import MOST_ROUNDS, Conversation

from tests.cli.chatting.recorded_server import ERROR, recorded_server, stream

CALL = {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}"}}
CALLS = stream({"content": "Let me see."}, {"tool_calls": [{"index": 0, **CALL}]})
RESULT = {"role": "tool", "tool_call_id": "a", "content": "noon"}
TURN = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    RESULT,
    {"role": "assistant", "content": "Now."},
]
NOW = stream({"content": "Now."})


def silent(_):
    pass


def conversation(client, answer_calls=lambda calls: [RESULT for _ in calls], **more):
    return Conversation(client, {"temperature": 0, "max_tokens": None}, answer_calls=answer_calls, **more)


def test_a_turn_with_a_call_is_what_openai_wants():
    with recorded_server([CALLS, NOW, NOW]) as (url, bodies), ChatClient(url, None) as client:
        talk = conversation(client, system="Be short.")
        assert talk.ask("When?", silent)
        assert talk.messages == [{"role": "system", "content": "Be short."}, *TURN]
        talk.clear()
        assert talk.ask("Now?", silent)
    assert bodies[1] == {
        "model": "first",
        "messages": [{"role": "system", "content": "Be short."}, *TURN[:3]],
        "temperature": 0,
        "stream": True,
    }
    assert [message["content"] for message in bodies[2]["messages"]] == ["Be short.", "Now?"]


def test_nobody_answers_calls():
    with recorded_server([CALLS]) as (url, _), ChatClient(url, None) as client:
        talk = conversation(client, answer_calls=lambda _: None)
        assert not talk.ask("When?", silent)
        assert talk.messages == TURN[:2]


def interrupted(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("streams", "answer_calls", "error"),
    [
        ([CALLS, stream({"content": "No"}).removesuffix("data: [DONE]\n\n") + ERROR], lambda _: [RESULT], AnswerError),
        ([CALLS], interrupted, KeyboardInterrupt),
        ([CALLS] * MOST_ROUNDS, lambda _: [RESULT], AnswerError),
    ],
    ids=["error", "ctrl-c", "endless"],
)
def test_a_turn_that_fails_changes_nothing(streams, answer_calls, error):
    with recorded_server([NOW, *streams]) as (url, _), ChatClient(url, None) as client:
        talk = conversation(client, answer_calls)
        talk.ask("Before?", silent)
        before = list(talk.messages)
        with pytest.raises(error):
            talk.ask("When?", silent)
        assert talk.messages == before


def test_the_last_question_once_more():
    with recorded_server([NOW, CALLS, NOW, stream({"content": "Later."})]) as (url, bodies), ChatClient(url, None) as client:
        talk = conversation(client)
        assert not talk.has_question
        talk.ask("Before?", silent)
        talk.ask("When?", silent)
        talk.model = "second"
        talk.retry(silent)
        assert talk.messages == [*talk.messages[:2], TURN[0], {"role": "assistant", "content": "Later."}]
    assert bodies[-1]["messages"] == talk.messages[:3]
    assert bodies[-1]["model"] == "second"


def test_a_server_without_a_list_of_models_gets_no_name():
    with recorded_server([NOW], models=()) as (url, bodies), ChatClient(f"{url}/v1", None) as client:
        conversation(client).ask("When?", silent)
    assert "model" not in bodies[0]
