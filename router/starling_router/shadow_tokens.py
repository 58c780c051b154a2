"""Makes the question that both revisions of a canary are asked, and compares the tokens of their answers.

A shadow has the prompt of a client's request, and asks for the likeliest tokens whatever the client asked for. What chooses among
logits otherwise (temperatures, penalties, forms) is left out: so log probabilities, which are of the model's own logits, say how
near each token was to being chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

import msgspec

SHADOW_TOKENS = 64
"""Tokens of a shadow's answer at most. A wrong model does not need more to show itself."""
NEAR_TIE = 0.25
"""Most by which log probabilities of two tokens may differ of which the stable revision could have taken either.

The largest logits of big models are some 16 to 32, where neighbouring bfloat16 numbers are 1/8 apart. Each of two logits may come
out one such step off, where a kernel adds up in another order.
"""
TOP_TOKENS = 5
"""Likeliest tokens that the stable revision tells of each position. A near tie is among them."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PROMPT_FIELDS = {
    CHAT: (
        "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "reasoning_effort", "cache_salt",
    ),
    COMPLETIONS: ("model", "prompt", "add_special_tokens", "cache_salt"),
}  # fmt: skip
"""Fields that make the prompt of a request, which a shadow repeats. Other APIs say no token ids in their answers."""
_GREEDY = {"temperature": 0, "repetition_penalty": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
_TOP = {CHAT: {"logprobs": True, "top_logprobs": TOP_TOKENS}, COMPLETIONS: {"logprobs": TOP_TOKENS}}


class _Part(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: str | list[str | _Part] | None = None


_Limit = Annotated[int, msgspec.Meta(ge=1)] | None


class _Asked(msgspec.Struct):
    """The fields of a body that decide whether a shadow can repeat it, and how many tokens it had room for."""

    messages: list[_Message] = []
    prompt: str | list[int] | None = None
    tool_choice: msgspec.Raw = msgspec.Raw()
    max_tokens: _Limit = None
    max_completion_tokens: _Limit = None

    @property
    def is_text(self) -> bool:
        parts = (part for message in self.messages for part in (message.content if isinstance(message.content, list) else ()))
        return all(isinstance(part, str) or part.type == "text" for part in parts)


_read_asked = msgspec.json.Decoder(_Asked).decode
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def shadow_body(path: str, body: bytes, *, tops: bool) -> bytes | None:
    """Returns the question of a request's shadows, with the likeliest tokens where `tops`; None: it can have none.

    It can where its prompt is one text: of images, and of prompts that are several, nothing is repeated.
    """
    if path not in _PROMPT_FIELDS:
        return None
    try:
        asked, given = _read_asked(body), _read_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not asked.is_text:
        return None
    limit = min(SHADOW_TOKENS, asked.max_completion_tokens or asked.max_tokens or SHADOW_TOKENS)
    fields: dict[str, Any] = {name: given[name] for name in _PROMPT_FIELDS[path] if name in given}
    if bytes(asked.tool_choice) == b'"none"':
        fields.pop("tools", None)  # they are not in the prompt
    return msgspec.json.encode(fields | _GREEDY | (_TOP[path] if tops else {}) | {"max_tokens": limit})


@dataclass(frozen=True, slots=True)
class ShadowAnswer:
    """Ids of the tokens of a prompt and its answer. `tops` has the likeliest of each position, where they were asked for."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    tops: Sequence[Mapping[int, float]] = ()


class _ChatTop(msgspec.Struct):
    token: str
    logprob: float


class _ChatPosition(msgspec.Struct):
    top_logprobs: list[_ChatTop]


class _ChatLogprobs(msgspec.Struct):
    content: list[_ChatPosition]


class _ChatChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _ChatLogprobs | None = None


class _Chat(msgspec.Struct):
    prompt_token_ids: list[int]
    choices: Annotated[list[_ChatChoice], msgspec.Meta(min_length=1)]


class _TextLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _TextChoice(msgspec.Struct):
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: _TextLogprobs | None = None


class _Text(msgspec.Struct):
    choices: Annotated[list[_TextChoice], msgspec.Meta(min_length=1)]


_read_chat, _read_text = msgspec.json.Decoder(_Chat).decode, msgspec.json.Decoder(_Text).decode


def read_shadow(path: str, answer: bytes) -> ShadowAnswer:
    """Reads the answer to a shadow. Raises ValueError for one that has no tokens."""
    if path == CHAT:
        chat = _read_chat(answer)
        of_chat = chat.choices[0]
        positions = [] if of_chat.logprobs is None else of_chat.logprobs.content
        tops = [{_id(top.token): top.logprob for top in position.top_logprobs} for position in positions]
        return ShadowAnswer(chat.prompt_token_ids, of_chat.token_ids, tops)
    of_text = _read_text(answer).choices[0]
    tables = [] if of_text.logprobs is None else of_text.logprobs.top_logprobs
    return ShadowAnswer(
        of_text.prompt_token_ids, of_text.token_ids, [{_id(name): value for name, value in table.items()} for table in tables]
    )


def _id(text: str) -> int:
    return int(text.removeprefix("token_id:"))


def difference(stable: ShadowAnswer, canary: ShadowAnswer, *, exact: bool) -> str:
    """Returns in words how the canary's tokens differ, without any text; empty: they do not, or begin to at a near tie.

    Behind the first token that differs all others may, so only that one is judged.
    """
    if (found := _first(stable.prompt, canary.prompt)) is not None:
        return f"token {found[0]} of the prompt is {_named(found[2])} in place of {_named(found[1])}"
    if (found := _first(stable.tokens, canary.tokens)) is None:
        return ""
    at, right, wrong = found
    what = f"token {at} of an answer is {_named(wrong)} in place of {_named(right)}"
    if exact:
        return what
    top = stable.tops[at] if at < len(stable.tops) else {}
    if right is None or wrong is None or right not in top or wrong not in top:
        return f"{what}, and not among the {TOP_TOKENS} likeliest tokens there"
    gap = top[right] - top[wrong]
    return "" if gap <= NEAR_TIE else f"{what}, whose log probability is lower by {gap:.3f}"


def _first(stable: Sequence[int], canary: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """Returns the first position that differs, and both tokens there; None for one that has ended."""
    pairs = enumerate(zip_longest(stable, canary))
    return next(((at, right, wrong) for at, (right, wrong) in pairs if right != wrong), None)


def _named(token: int | None) -> str:
    return "none" if token is None else str(token)
