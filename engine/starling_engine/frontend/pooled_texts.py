"""Texts that become vectors, as the checkpoint's authors mean them: behind a prompt, or through the chat template."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from itertools import takewhile
from typing import Literal

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.late_interaction import LateInteraction
from starling_engine.frontend.prompt_encoder import PromptEncoder, PromptForm
from starling_engine.frontend.shown_tools import Message
from starling_engine.frontend.tokenizer import Truncation
from starling_engine.model_config.multi_vector import TextRole
from starling_engine.model_config.pooler import PoolerConfig

Render = Callable[..., Awaitable[ChatPrompt]]
"""Renders a chat, given the arguments of `ChatRenderer.render` by name. A server has a process for it."""
_FILLERS = ("0", "1 2 3 4")
"""Texts without a token in common, as sentence-transformers has them: what is the same behind both is the template's."""


class PooledTexts:
    """Makes token ids as sentence-transformers does."""

    def __init__(self, encoder: PromptEncoder, render: Render, pooler: PoolerConfig) -> None:
        self._encoder = encoder
        self._render = render
        self._pooler = pooler
        self._rendering = pooler.rendering
        self.late = LateInteraction(encoder.tokenizer, pooler.late)
        self._tails: dict[tuple[str, bool], list[int]] = {}

    @property
    def special_tokens(self) -> bool:
        """True if the tokenizer puts its tokens around a text. Templates write their own."""
        return self._pooler.messages is None

    @property
    def names(self) -> Collection[str]:
        """The names of the checkpoint's prompts."""
        return self._pooler.prompts.keys()

    def prompt(self, name: str | None, adapter: str | None = None) -> str:
        """Returns the text that goes before an input: that of a name, else that of an adapter's task, or the checkpoint's default.

        Raises InvalidRequest.
        """
        default = adapter if adapter in self._pooler.prompts else self._pooler.default_prompt_name
        name = default if name is None else name
        if name is None:
            return ""
        if name not in self._pooler.prompts:
            possible = ", ".join(self._pooler.prompts) or "none"
            raise InvalidRequest(f"{name[:100]!r} is no prompt of this model; possible: {possible}", "prompt_name")
        return self._cased(self._pooler.prompts[name])

    def prompt_of_role(self, role: TextRole) -> str:
        """Returns the text that goes before texts of a role: the prompt of that name, or the default where there is none."""
        return self.prompt(role if role in self.names else None)

    def _cased(self, text: str) -> str:
        return text.lower() if self._pooler.lower_case else text

    def reader(self, role: TextRole) -> Callable[[str, str, PromptForm], Awaitable[list[int]]]:
        """Returns `ids` for texts of a role, which a model with a vector for each token may cut."""

        async def read(text: str, param: str, form: PromptForm) -> list[int]:
            return await self.ids(text, param, self.late.form(form, role))

        return read

    async def ids(self, text: str, param: str, form: PromptForm) -> list[int]:
        """Returns the token ids of a text, whose prompt is the form's prefix. Raises InvalidRequest or PromptTooLong."""
        text = self._cased(text)
        if self._pooler.messages is None:
            return await self._encoder.text(text, param, form)
        if form.truncation is None:
            return await self._encoder.chat(await self._rendered(text, form.prefix), param, form)
        rendered = await self._rendered(self._encoder.possible(text, form.truncation.side), form.prefix)
        ids = await asyncio.to_thread(self._encoder.tokenizer.encode, rendered, form.add_special_tokens)
        if form.truncation.side == "left" or not self._pooler.messages.restore_suffix:
            return self._encoder.cut(ids, param, form)
        return self._encoder.fitting(await self._cut_before_tail(ids, form), param, form.room)

    async def _cut_before_tail(self, ids: list[int], form: PromptForm) -> list[int]:
        """Returns the first tokens of a prompt, and the last ones, which the template wrote: a vector may be the last one's."""
        assert form.truncation is not None
        most = form.truncation.tokens
        if len(ids) <= most:
            return ids
        tail = await self._tail(form)
        if len(tail) >= most:
            raise InvalidRequest(
                f"the template writes {len(tail)} tokens behind a text, got {most} in all", "truncate_prompt_tokens"
            )
        return [*ids[: most - len(tail)], *tail]

    async def _tail(self, form: PromptForm) -> list[int]:
        """Returns the tokens that the template writes behind any text. A checkpoint has few prompts, so they are kept."""
        key = form.prefix, form.add_special_tokens
        if key not in self._tails:
            both = [
                self._encoder.tokenizer.encode(await self._rendered(filler, form.prefix), form.add_special_tokens)
                for filler in _FILLERS
            ]
            pairs = zip(*map(reversed, both), strict=False)
            common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            self._tails[key] = common[::-1] if len(common) < min(map(len, both)) else []
        return self._tails[key]

    async def _rendered(self, text: str, prompt: str) -> ChatPrompt:
        messages = [self._message("system", prompt)] if prompt else []
        return await self._render(messages=[*messages, self._message("user", text)], **self._rendering)

    def _message(self, role: str, text: str) -> Message:
        assert self._pooler.messages is not None
        return {"role": role, "content": [{"type": "text", "text": text}] if self._pooler.messages.parts else text}


def truncation_to(tokens: int | None, side: Literal["left", "right"] | None, least: int, longest: int) -> Truncation | None:
    """Returns what `truncate_prompt_tokens` and `truncation_side` ask for. Raises InvalidRequest if no text would stay."""
    if tokens is None:
        if side is not None:
            raise InvalidRequest("needs truncate_prompt_tokens, which says how much stays", "truncation_side")
        return None
    if not isinstance(tokens, int):
        raise InvalidRequest(f"must be a whole number, got {tokens!r}", "truncate_prompt_tokens")
    if tokens != -1 and not least <= tokens <= longest:
        raise InvalidRequest(f"must be -1 or in [{least}, {longest}], got {tokens}", "truncate_prompt_tokens")
    return Truncation(longest if tokens == -1 else tokens, side or "right")


def role_of(prompt_name: str | None) -> TextRole:
    """Returns the role of texts behind the prompt of that name."""
    return "query" if prompt_name == "query" else "document"
