"""The forms of prompts, conversations and parameters."""

from typing import Any

import pytest
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.prompts import ParsedPrompt, one_per_prompt, parse_conversations, parse_prompts

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompts", "parsed"),
    [
        ("a", [ParsedPrompt("a")]),
        (["a", "b"], [ParsedPrompt("a"), ParsedPrompt("b")]),
        ([1, 2], [ParsedPrompt(None, [1, 2])]),
        ([[1], [2]], [ParsedPrompt(None, [1]), ParsedPrompt(None, [2])]),
        ({"prompt": "a"}, [ParsedPrompt("a")]),
        ({"prompt_token_ids": [1], "multi_modal_data": None}, [ParsedPrompt(None, [1])]),
        ([{"prompt_token_ids": [1], "prompt": "a"}, "b"], [ParsedPrompt("a", [1]), ParsedPrompt("b")]),
        ([], []),
    ],
)
def test_prompts(prompts: Any, parsed: list[ParsedPrompt]) -> None:
    assert parse_prompts(prompts) == parsed


@pytest.mark.parametrize(
    "wrong", [None, 3, [], {}, {"prompt": 3}, {"prompt_token_ids": "a"}, {"prompt_token_ids": [1.5]}, {"text": "a"}, [True]]
)
def test_names_the_prompt_that_is_none(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is text") as caught:
        parse_prompts(["a", wrong])
    assert caught.value.param == "prompts[1]"


def test_what_would_be_left_out_of_a_prompt_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"text or token ids .* and no more, got 'multi_modal_data'"):
        parse_prompts({"prompt": "What is this?", "multi_modal_data": {"image": b"..."}})


def test_says_what_a_prompt_is_where_none_is_given() -> None:
    with pytest.raises(InvalidRequest, match="a prompt is text"):
        parse_prompts(3)  # type: ignore[arg-type]


def test_conversations() -> None:
    assert parse_conversations([MESSAGE, MESSAGE]) == [[MESSAGE, MESSAGE]]
    assert parse_conversations([[MESSAGE], [MESSAGE, MESSAGE]]) == [[MESSAGE], [MESSAGE, MESSAGE]]


@pytest.mark.parametrize("wrong", [3, None, "hi", ["hi"], MESSAGE, [MESSAGE, [MESSAGE]]])
def test_what_is_no_conversation_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_conversations(wrong)
    assert caught.value.param == "messages"


def test_one_for_all_or_one_each() -> None:
    assert one_per_prompt(1, 3, "priority", int) == [1, 1, 1]
    assert one_per_prompt([1, 2], 2, "priority", int) == [1, 2]
    with pytest.raises(InvalidRequest, match="2 priority for 3 prompts"):
        one_per_prompt([1, 2], 3, "priority", int)
    with pytest.raises(InvalidRequest, match="must be int, or a list with one for each prompt, got 'high'"):
        one_per_prompt("high", 3, "priority", int)  # type: ignore[arg-type]
