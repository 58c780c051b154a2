"""The tokenizer of a checkpoint, read from its files without importing transformers."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.frontend.chat import ChatRenderer, ChatTemplates
from starling_engine.frontend.control_tokens import ChatPrompt, ControlTokens
from starling_engine.frontend.escaping_tokenizer import EscapingTokenizer
from starling_engine.frontend.shown_tools import Message
from starling_engine.frontend.token_bytes import Spelling, spelling_of
from starling_engine.tokenizer_files import read_tokenizer

# The library reads it at each call. A prompt is a batch of one text, for which its threads have no use: to wake one up takes
# milliseconds where others are busy.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

UNRENDERED = frozenset(
    {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Arguments of transformers' `apply_chat_template` that are of its ids, and are not here."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keeps at most `tokens` of a prompt, of which it cuts those on a side: on the right it keeps the first ones."""

    tokens: int
    side: Literal["left", "right"] = "right"

    def cut(self, ids: list[int]) -> list[int]:
        return ids[: self.tokens] if self.side == "right" else ids[-self.tokens :]


class Tokenizer:
    """A checkpoint's tokenizer and its chat templates. Immutable, so several threads may use it.

    `vocab_size` is one more than the highest token id known here; the model's may be larger (padded). `special_ids` are the tokens
    that `decode` skips with `skip_special_tokens`. `added_tokens` are those that are tokens as a whole, by their text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str],
        templates: ChatTemplates,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """`named_tokens`: bos_token, eos_token, ... by name, as chat templates see them. `info`: tokenizer_config.json."""
        self.info = dict(info or {})
        added = backend.get_added_tokens_decoder()
        self.backend = backend
        self.spelling: Spelling | None = spelling_of(_decoder_section(backend))
        self.added_tokens: Mapping[str, int] = {token.content: id_ for id_, token in added.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        listed = backend.get_vocab(with_added_tokens=False).values()
        self.vocab_size = 1 + max([*listed, *added], default=-1)
        # The vocabulary of some checkpoints lists added tokens, too, and ids may have gaps.
        self._last_plain_id = max((id_ for id_ in listed if id_ not in added), default=-1)
        self.bos_token_id = self._id_of(named_tokens.get("bos_token"))
        self.eos_token_id = self._id_of(named_tokens.get("eos_token"))
        self.mask_token_id = self._id_of(named_tokens.get("mask_token"))
        special = frozenset(token.content for token in added.values() if token.special)
        others = frozenset(token.content for token in added.values()) - special
        control = ControlTokens.of(special | templates.turn_markers(others))
        self.renderer = ChatRenderer(templates, dict(named_tokens), control)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path, markers: Sequence[str] = (), template: str | None = None) -> "Tokenizer":
        """Reads tokenizer.json and the small files next to it. Raises ModelError when they cannot be used.

        Texts of the vocabulary that `markers` are, or begin with, are one token wherever they are spelled. A `template` takes the
        place of the checkpoint's.
        """
        files = read_tokenizer(folder)
        _mark(files.backend, markers)
        templates = ChatTemplates.load(folder, files.config) if template is None else ChatTemplates({"default": template})
        return cls(files.backend, files.named_tokens, templates, files.config)

    def check_fits(self, vocab_size: int) -> None:
        """Raises ModelError for a model without embeddings of tokens that are no added ones: prompts could not be computed."""
        if self._last_plain_id >= vocab_size:
            token = f"the tokenizer has token {self._last_plain_id}"
            raise ModelError(f"config.json: vocab_size: {token}, the model has {vocab_size} embeddings")

    def encode(self, prompt: str | ChatPrompt, add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[int]:
        """Returns token ids. `add_special_tokens` adds the checkpoint's tokens around a plain prompt (mostly a BOS token).

        Control tokens that a text spells are control tokens; those that a chat's messages spell are text. Only a plain prompt can
        be truncated; the tokens around it stay, and count.
        """
        try:
            if isinstance(prompt, ChatPrompt) and prompt.control is not None:
                return self._escaping.encode(prompt, add_special_tokens)
            text = prompt.text if isinstance(prompt, ChatPrompt) else prompt
            if truncation is not None:
                return self._truncated(text, add_special_tokens, truncation)
            # Faster than encode(): it computes no offsets, and other threads run meanwhile.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # half a surrogate pair, as JSON can hold one
            raise InvalidRequest("the text is not valid Unicode: it holds half of a surrogate pair", "prompt") from error

    def encode_pair(self, first: str, second: str, truncation: Truncation | None, param: str) -> tuple[list[int], int | None]:
        """Returns token ids of two texts with the checkpoint's tokens around them, and where those of the second segment begin.

        That is None for a tokenizer without segments. A truncation cuts the second text's end. Raises InvalidRequest where nothing
        of it would stay.
        """
        try:
            if truncation is None:
                found = self.backend.encode_batch_fast([(first, second)], add_special_tokens=True)[0]
            else:
                one, other = (self.backend.encode(text, add_special_tokens=False) for text in (first, second))
                room = truncation.tokens - len(one.ids) - int(self.backend.num_special_tokens_to_add(is_pair=True))
                if room < 1:
                    raise InvalidRequest(f"leaves no room for {param} behind the first text", "truncate_prompt_tokens")
                other.truncate(room, direction="right")
                found = self.backend.post_process(one, other, add_special_tokens=True)
        except TypeError as error:  # half a surrogate pair, as JSON can hold one
            raise InvalidRequest("the text is not valid Unicode: it holds half of a surrogate pair", param) from error
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else None

    def num_around(self, add_special_tokens: bool) -> int:
        """Returns how many tokens `encode` puts around a plain prompt."""
        return int(self.backend.num_special_tokens_to_add(is_pair=False)) if add_special_tokens else 0

    def _truncated(self, text: str, add_special_tokens: bool, truncation: Truncation) -> list[int]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        encoding.truncate(truncation.tokens - self.num_around(add_special_tokens), direction=truncation.side)
        ids: list[int] = self.backend.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return ids

    def first_tokens(self, text: str, count: int) -> str:
        """Returns the beginning of the text that its first `count` tokens are."""
        offsets = self.backend.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= count else text[: offsets[count][0]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the token's exact bytes, which need not be whole characters; none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Returns the token as OpenAI's logprobs show it: bytes that are no whole character appear as \\xe2."""
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. It takes a quarter of a second with a vocabulary of 150,000."""
        return max((len(self.token_text(token)) for token in range(self.vocab_size)), default=0)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.renderer.templates.by_name)

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> ChatPrompt:
        """Returns the prompt for a conversation; encode it with add_special_tokens=False, because templates write their own.

        `template` is a jinja2 template or the name of one of the checkpoint's. `kwargs` (tools, documents, enable_thinking,
        ...) are variables of the template. Raises InvalidRequest when it cannot render the messages.
        """
        return self.renderer.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            variables=kwargs,
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """Returns a conversation's token ids, or its text, as transformers' tokenizers do: scripts for vLLM call it.

        See `render_chat`. Of a text nobody can tell whether a template or a message spelled a control token; of the ids one can.
        Raises TypeError for arguments of theirs that would change what is returned.
        """
        for name in UNRENDERED & kwargs.keys():
            if kwargs.pop(name):
                raise TypeError(f"apply_chat_template() has no {name}: it returns a text, or a list of token ids")
        chat = self.render_chat(conversation, add_generation_prompt=add_generation_prompt, template=chat_template, **kwargs)
        return self.encode(chat, add_special_tokens=False) if tokenize else chat.text

    @cached_property
    def _escaping(self) -> EscapingTokenizer:
        return EscapingTokenizer(self.backend, self.renderer.control.spellings)

    def _spell(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.spelling is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self.spelling.to_bytes(token)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def _mark(backend: tokenizers.Tokenizer, markers: Sequence[str]) -> None:
    for marker in markers:
        known = [text for text in (marker, *marker.split()[:1]) if backend.token_to_id(text) is not None]
        if known and backend.encode(known[0], add_special_tokens=False).tokens != known[:1]:
            backend.add_special_tokens([tokenizers.AddedToken(known[0], normalized=False, special=True)])


def _decoder_section(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    state: dict[str, Any] | None = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return state
