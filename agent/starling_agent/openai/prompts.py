"""Reads a request's prompts as token ids. Prompts that cannot fit are refused before they cost time."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starling_engine.errors import InvalidRequest, PromptTooLong
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.tokenizer import Tokenizer

from starling_agent.openai.protocol.base import shown

THREAD_CHARACTERS = 16_384
"""Longer texts are tokenized in a thread: the tokenizer releases the GIL, and streams go on meanwhile."""

NORMALIZED_SHRINK = 4
"""Factor by which a tokenizer's normalizer may shorten a text (NFC composes characters); no known one exceeds it."""


class PromptReader:
    """Reads `prompt` and `input` in all their forms.

    The longest token gives the longest text that can fit, so a text of megabytes is refused before tokenization.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int, max_prompts: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompts = max_prompts
        self.max_model_len = max_model_len
        self._max_characters = max_model_len * max(tokenizer.longest_token, 1) * NORMALIZED_SHRINK

    async def read(self, value: object, param: str, add_special_tokens: bool) -> list[list[int]]:
        """Returns token ids of each prompt in a text, a list of texts, a list of ids or a list of lists of ids."""
        if isinstance(value, str):
            return [await self.text(value, param, add_special_tokens)]
        if not isinstance(value, list):
            raise InvalidRequest(f"{param} must be a text, token ids, or a list of either, got {shown(value)}", param)
        kinds = set(map(type, value))
        if kinds == {int}:
            return [self.ids(value, param)]
        if kinds not in ({str}, {list}):
            self._explain_mixture(value, param)
        if len(value) > self._max_prompts:
            raise InvalidRequest(f"at most {self._max_prompts} prompts in one request, got {len(value)}", param)
        prompts = []
        for i, item in enumerate(value):
            where = f"{param}[{i}]"
            is_text = isinstance(item, str)
            prompts.append(await self.text(item, where, add_special_tokens) if is_text else self.ids(item, where))
        return prompts

    async def text(self, prompt: str | ChatPrompt, param: str, add_special_tokens: bool) -> list[int]:
        return self._fitting(await self.encode(prompt, param, add_special_tokens), param)

    async def encode(self, prompt: str | ChatPrompt, param: str, add_special_tokens: bool) -> list[int]:
        """Returns token ids of a prompt. It may be too long for the model, but not by orders of magnitude."""
        text = prompt.text if isinstance(prompt, ChatPrompt) else prompt
        if len(text) > self._max_characters:
            why = f"the prompt has {len(text)} characters, and so many tokens never hold more than {self._max_characters}"
            raise _too_long(self.max_model_len, why, param)
        if len(text) > THREAD_CHARACTERS:
            return await asyncio.to_thread(self._tokenizer.encode, prompt, add_special_tokens)
        return self._tokenizer.encode(prompt, add_special_tokens)

    def ids(self, ids: list[Any], param: str) -> list[int]:
        if any(type(token) is not int for token in ids):
            wrong = next(i for i, token in enumerate(ids) if type(token) is not int)
            raise InvalidRequest(f"a token id must be an integer, got {shown(ids[wrong])}", f"{param}[{wrong}]")
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            wrong = next(i for i, token in enumerate(ids) if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"token id {ids[wrong]} is not in the vocabulary of {self._vocab_size} tokens", f"{param}[{wrong}]"
            )
        return self._fitting(ids, param)

    def _fitting(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise InvalidRequest("the prompt is empty", param)
        if len(ids) >= self.max_model_len:
            raise _too_long(self.max_model_len, f"the prompt alone has {len(ids)}, and the output needs room too", param)
        return ids

    def _explain_mixture(self, value: Sequence[object], param: str) -> None:
        if not value:
            raise InvalidRequest("the prompt is empty", param)
        first = type(value[0]) if type(value[0]) in (str, int, list) else None
        wrong = next((i for i, item in enumerate(value) if type(item) is not first), 0)
        raise InvalidRequest(
            f"a list must hold only texts, only token ids, or only lists of token ids, got {shown(value[wrong])}",
            f"{param}[{wrong}]",
        )


def output_budget(
    prompts: Sequence[Sequence[int]], requested: int | None, default: int | None, limit: int, param: str
) -> int | None:
    """Returns `max_tokens`: the requested number, else the default or what fits of it. Raises PromptTooLong with both counts."""
    longest = max(len(prompt) for prompt in prompts)
    if requested is None:
        return default if default is None else min(default, limit - longest)
    if requested > 0 and longest + requested > limit:
        why = f"the prompt has {longest} and {param} asks for {requested} more, {longest + requested} in all"
        raise _too_long(limit, why, param)
    return requested


def _too_long(limit: int, why: str, param: str) -> PromptTooLong:
    # LiteLLM looks for exactly these words to send the request to a model with a longer context.
    return PromptTooLong(f"This model's maximum context length is {limit} tokens. However, {why}", param)
