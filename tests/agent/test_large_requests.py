"""Requests with very many small parts are read in a time that grows with their size, since all streams wait meanwhile."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starling_agent.openai import field_names
from starling_agent.openai.anthropic.conversion import chat_fields as anthropic_fields
from starling_agent.openai.anthropic.protocol import MessagesRequest
from starling_agent.openai.messages import template_messages
from starling_agent.openai.responses.conversion import ChatItems
from starling_engine.errors import InvalidRequest

SECONDS = 8.0
"""Processor time that the linear way does not take on a slow and busy machine, and the quadratic one takes many times."""


@contextmanager
def soon() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < SECONDS


def test_many_calls_and_their_answers() -> None:
    ids = [f"call_{number}" for number in range(40_000)]
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids]
    answers = [{"role": "tool", "tool_call_id": name, "content": ""} for name in reversed(ids)]
    chat: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, *answers]
    with soon():
        assert len(template_messages(chat)) == len(chat)
    chat[-1] = {"role": "tool", "tool_call_id": "other", "content": ""}
    with soon(), pytest.raises(InvalidRequest, match=r"the id 'other'; it has 'call_0', .*, \.\.\.$") as caught:
        template_messages(chat)
    assert len(str(caught.value)) < 500


def test_many_instructions() -> None:
    items = ChatItems()
    with soon():
        items.add([{"role": "system", "content": "x" * 50}] * 100_000, "input")
        (system,) = items.messages()
    assert len(system["content"]) == 52 * 100_000 - 2


def test_names_of_items_that_a_field_is_not_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be an expression to compile."""
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant") * 500]
    _, names = anthropic_fields(MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": messages}))
    tried: list[str] = []

    def subn(pattern: str, name: str, field: str) -> tuple[str, int]:
        tried.append(pattern)
        return substituted(pattern, name, field)

    substituted = re.subn
    monkeypatch.setattr(field_names.re, "subn", subn)
    every = [*names]
    assert field_names.own_name("messages", every) is None and not tried
    assert field_names.own_name("messages[998].content", every) == "messages[998]" and len(tried) == 1
