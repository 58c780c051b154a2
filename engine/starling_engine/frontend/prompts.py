"""Parses the forms in which callers of `LLM` write prompts, conversations and parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.shown_tools import Message

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

_KEYS = ("prompt", "prompt_token_ids")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt. `ids` None means that the text is not tokenized yet."""

    text: str | None
    ids: list[int] | None = None


def parse_prompts(prompts: Prompt | Sequence[Prompt]) -> list[ParsedPrompt]:
    """Parses one prompt or a list of them. A plain list of integers is one prompt. Raises InvalidRequest naming the wrong one."""
    single = isinstance(prompts, str | Mapping) or _are_ids(prompts) or not isinstance(prompts, Iterable)
    return [_parse(prompt, f"prompts[{index}]") for index, prompt in enumerate([prompts] if single else prompts)]


def parse_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Returns the conversations of one conversation or a list of them. Raises InvalidRequest for anything else."""
    if not _is_list(messages) or not all(isinstance(item, Mapping) or _is_list(item) for item in messages):
        raise InvalidRequest('is a list of messages {"role": ..., "content": ...}, or a list of such lists', "messages")
    single = [message for message in messages if isinstance(message, Mapping)]
    several = [chat for chat in messages if not isinstance(chat, Mapping)]
    if single and several:
        raise InvalidRequest("must be one conversation or a list of conversations, not a mixture", "messages")
    return several if several else [single]


def one_per_prompt(values: T | Sequence[T], count: int, name: str, kind: type[T]) -> list[T]:
    """Returns `values` for `count` prompts: one for all, or a list with one for each. Raises InvalidRequest."""
    each: list[Any] = list(values) if isinstance(values, list | tuple) else [values] * count
    if not all(isinstance(value, kind) for value in each):
        raise InvalidRequest(f"must be {kind.__name__}, or a list with one for each prompt, got {values!r}", name)
    if len(each) != count:
        raise InvalidRequest(f"{len(each)} {name} for {count} prompts", name)
    return each


def _parse(prompt: object, param: str) -> ParsedPrompt:
    if isinstance(prompt, Mapping) and (more := [key for key in prompt if key not in _KEYS and prompt[key] is not None]):
        raise InvalidRequest(f"a prompt is text or token ids ({' or '.join(_KEYS)}) and no more, got {more[0]!r}", param)
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


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
