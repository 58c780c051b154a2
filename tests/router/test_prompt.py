"""Prompts as texts: what has a prefix in common, and what may not have."""

import json

import pytest
from starling_router.prompt import CHUNK_BYTES, TOKEN_BYTES, read_body, text_prompt

LONG = "A text that is long enough for several chunks of a prompt. " * 20


def blocks(owner: bytes = b"", **fields: object) -> list[int]:
    return [*text_prompt(read_body(json.dumps({"model": "m", **fields}).encode()), owner).blocks]


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def common(first: list[int], second: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def test_the_next_turn_of_a_chat_begins_with_the_last_one() -> None:
    first, second = blocks(messages=chat(LONG)), blocks(messages=chat(LONG, "And then?"))
    assert len(first) == len(LONG) // CHUNK_BYTES
    assert common(first, second) == len(first)
    assert common(first, blocks(messages=chat("B" + LONG))) == 0


@pytest.mark.parametrize("name", ["tools", "system", "instructions"])
def test_what_templates_write_before_the_messages_is_part_of_the_prefix(name: str) -> None:
    assert common(blocks(messages=chat(LONG), **{name: "x"}), blocks(messages=chat(LONG), **{name: "y"})) == 0


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_other_names_of_prompts(name: str) -> None:
    assert len(blocks(**{name: LONG})) >= len(LONG) // CHUNK_BYTES


def test_callers_and_salts_have_nothing_in_common() -> None:
    plain = blocks(messages=chat(LONG))
    assert common(plain, blocks(b"Bearer one", messages=chat(LONG))) == 0
    assert common(plain, blocks(messages=chat(LONG), cache_salt="s")) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"messages": ', b"\xff", b"null"])
def test_what_is_no_object_has_no_prompt(body: bytes) -> None:
    assert text_prompt(read_body(body), b"").blocks == []


def test_a_body_that_only_agents_can_read_is_as_long_as_it_is() -> None:
    body = json.dumps({"messages": chat(LONG), "metadata": {"x": float("nan")}}).encode()
    assert text_prompt(read_body(body), b"").tokens >= len(body) // TOKEN_BYTES
