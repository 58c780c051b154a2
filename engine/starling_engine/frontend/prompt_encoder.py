"""Encodes prompts as token ids. Those that cannot fit are refused before they cost time."""

import asyncio
from dataclasses import dataclass

from starling_engine.errors import InvalidRequest, PromptTooLong
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.tokenizer import Tokenizer, Truncation

THREAD_CHARACTERS = 16_384
"""Longer texts are tokenized in a thread: the tokenizer releases the GIL, and streams go on meanwhile."""

NORMALIZED_SHRINK = 4
"""Factor by which a tokenizer's normalizer may shorten a text (NFC composes characters); no known one exceeds it."""


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The form of a request's prompts on their way to token ids.

    prefix   goes before each text; token ids have none
    room     tokens that the model has to have room for behind them
    """

    add_special_tokens: bool
    prefix: str = ""
    truncation: Truncation | None = None
    room: int = 1


class PromptEncoder:
    """Encodes texts and chats. Errors name `param`, the argument or field that a prompt is of.

    The longest token gives the longest text that can fit, so a text of megabytes is refused before tokenization.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_characters = max_model_len * max(tokenizer.longest_token, 1) * NORMALIZED_SHRINK

    async def text(self, text: str, param: str, form: PromptForm) -> list[int]:
        """Returns token ids of a plain prompt. Raises InvalidRequest, or PromptTooLong where nothing cuts it."""
        text = f"{form.prefix}{text}"
        if form.truncation is None:
            return self.fitting(await self.encode(text, param, form.add_special_tokens), param, form.room)
        text = self.possible(text, form.truncation.side)
        ids = await asyncio.to_thread(self.tokenizer.encode, text, form.add_special_tokens, form.truncation)
        return self.fitting(ids, param, form.room)

    async def chat(self, prompt: ChatPrompt, param: str, form: PromptForm) -> list[int]:
        """Returns token ids of a chat, of which a truncation cuts as of those that a request sends."""
        return self.cut(await self.encode(prompt, param, form.add_special_tokens), param, form)

    async def encode(self, prompt: str | ChatPrompt, param: str, add_special_tokens: bool) -> list[int]:
        """Returns token ids of a prompt. It may be too long for the model, but not by orders of magnitude."""
        text = prompt.text if isinstance(prompt, ChatPrompt) else prompt
        self.check_length(text, param)
        if len(text) > THREAD_CHARACTERS:
            return await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens)
        ids = self.tokenizer.encode(prompt, add_special_tokens)
        await asyncio.sleep(0)  # others run between the prompts of a list
        return ids

    def check_length(self, text: str, param: str) -> None:
        """Raises PromptTooLong for a text of which no part but a beginning can fit."""
        if len(text) > self.max_characters:
            why = f"the prompt is too long: {len(text)} characters, and so many tokens never hold more than {self.max_characters}"
            raise too_long(self.max_model_len, why, param)

    def possible(self, text: str, side: str = "right") -> str:
        """Returns what may be left of a text that is cut on that side. The rest need not be tokenized, which takes long."""
        return text[: self.max_characters] if side == "right" else text[-self.max_characters :]

    def cut(self, ids: list[int], param: str, form: PromptForm) -> list[int]:
        """Returns the ids that the form's truncation leaves. Raises as `fitting`."""
        return self.fitting(form.truncation.cut(ids) if form.truncation else ids, param, form.room)

    def fitting(self, ids: list[int], param: str, room: int) -> list[int]:
        """Returns the ids as they are. Raises InvalidRequest for none, PromptTooLong for too many."""
        if not ids:
            raise InvalidRequest("the prompt is empty", param)
        if len(ids) + room > self.max_model_len:
            beside = " beside an output" if room else ""
            longest = self.max_model_len - room
            raise too_long(self.max_model_len, f"the prompt is too long: {len(ids)} tokens > {longest}{beside}", param)
        return ids


def too_long(limit: int, why: str, param: str) -> PromptTooLong:
    # LiteLLM looks for exactly these words to send the request to a model with a longer context. Claude Code shortens a
    # conversation where it finds "prompt is too long", and reads two numbers of tokens with > between them.
    return PromptTooLong(f"This model's maximum context length is {limit} tokens. However, {why}", param)
