"""Parses the forms in which callers of `LLM` write prompts, conversations and parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.shown_tools import Message

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt. `ids` None means that the text is not tokenized yet."""

    text: str | None
    ids: list[int] | None = None


def parse_prompts(prompts: Prompt | Sequence[Prompt]) -> list[ParsedPrompt]:
    """Parses one prompt or a list of them. A plain list of integers is one prompt. Raises InvalidRequest naming the wrong one."""
    single = isinstance(prompts, str | Mapping) or _are_ids(prompts)
    return [_parse(prompt, f"prompts[{index}]") for index, prompt in enumerate([prompts] if single else prompts)]


def parse_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Returns the conversations of one conversation or a list of them. Raises InvalidRequest for a mixture."""
    single = [message for message in messages if isinstance(message, Mapping)]
    several = [chat for chat in messages if not isinstance(chat, Mapping)]
    if single and several:
        raise InvalidRequest("must be one conversation or a list of conversations, not a mixture", "messages")
    return several if several else [single]


def one_per_prompt(values: T | Sequence[T], count: int, name: str) -> list[T]:
    """Returns `values` for `count` prompts: one for all, or a list with one for each. Raises InvalidRequest."""
    if not isinstance(values, list | tuple):
        return [values] * count  # type: ignore[list-item]  # a Sequence[T] is a list or tuple here
    if len(values) != count:
        raise InvalidRequest(f"{len(values)} {name} for {count} prompts", name)
    return list(values)


def _parse(prompt: object, param: str) -> ParsedPrompt:
    match prompt:
        case str():
            return ParsedPrompt(prompt)
        case {"prompt_token_ids": list() as ids, "prompt": str() as text} if _are_ids(ids):
            return ParsedPrompt(text, ids)
        case {"prompt_token_ids": list() as ids} | (list() as ids) if _are_ids(ids):
            return ParsedPrompt(None, ids)
        case {"prompt": str() as text}:
            return ParsedPrompt(text)
    raise InvalidRequest('a prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}', param)


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
