"""Reads a request's prompts as token ids, in all the forms that clients write them in."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.prompt_encoder import PromptEncoder, PromptForm, too_long
from starling_engine.frontend.tokenizer import Tokenizer

from starling_agent.openai.protocol.base import shown

ReadText = Callable[[str, str, PromptForm], Awaitable[list[int]]]
"""Makes token ids of a text, which the second argument names in errors."""


class PromptReader(PromptEncoder):
    """Reads `prompt` and `input` in all their forms."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int, max_prompts: int) -> None:
        super().__init__(tokenizer, max_model_len)
        self._vocab_size = vocab_size
        self._max_prompts = max_prompts

    async def read(self, value: object, param: str, form: PromptForm, text: ReadText | None = None) -> list[list[int]]:
        """Returns token ids of each prompt in a text, a list of texts, a list of ids or a list of lists of ids.

        `text` reads the texts in place of this reader.
        """
        text = text or self.text
        if isinstance(value, str):
            return [await text(value, param, form)]
        if not isinstance(value, list):
            raise InvalidRequest(f"{param} must be a text, token ids, or a list of either, got {shown(value)}", param)
        kinds = set(map(type, value))
        if kinds == {int}:
            return [self._ids(value, param, form)]
        if kinds not in ({str}, {list}):
            self._explain_mixture(value, param)
        if len(value) > self._max_prompts:
            raise InvalidRequest(f"at most {self._max_prompts} prompts in one request, got {len(value)}", param)
        prompts = []
        for i, item in enumerate(value):
            where = f"{param}[{i}]"
            is_text = isinstance(item, str)
            prompts.append(await text(item, where, form) if is_text else self._ids(item, where, form))
        return prompts

    def _ids(self, ids: list[Any], param: str, form: PromptForm) -> list[int]:
        if any(type(token) is not int for token in ids):
            wrong = next(i for i, token in enumerate(ids) if type(token) is not int)
            raise InvalidRequest(f"a token id must be an integer, got {shown(ids[wrong])}", f"{param}[{wrong}]")
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            wrong = next(i for i, token in enumerate(ids) if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"token id {ids[wrong]} is not in the vocabulary of {self._vocab_size} tokens", f"{param}[{wrong}]"
            )
        return self.cut(ids, param, form)

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
        raise too_long(limit, why, param)
    return requested
