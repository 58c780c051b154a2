"""A second tokenizer over the same model, whose control tokens have secret names."""

import json
from collections.abc import Mapping
from typing import cast

import tokenizers

from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.secret_names import rename_in_model, secret_names


class EscapingTokenizer:
    """Encodes chats in which messages spell control tokens: the template's tokens are renamed to their secret names first.

    Model, normalizer and the rest are shared with the other tokenizer. Tokens keep their rules, so merges and spaces at the edges
    come out the same.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spellings: frozenset[str]) -> None:
        added = backend.get_added_tokens_decoder()
        self._names = secret_names({token.content: id_ for id_, token in added.items() if token.content in spellings})
        produced = [spelling for spelling in self._names if _makes_of_text(backend.model, spelling)]
        model = _renamed(backend, {spelling: self._names[spelling] for spelling in produced}) if produced else backend.model
        self._backend = _with_model(model, backend)
        self._backend.add_tokens([_with_name(token, self._names.get(token.content)) for token in added.values()])
        names = {id_: self._names.get(token.content, token.content) for id_, token in added.items()}
        self._ids = {self._backend.token_to_id(name): id_ for id_, name in names.items()}

    def encode(self, prompt: ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Returns token ids. Raises TypeError for a text that is not valid Unicode, as tokenizers do."""
        encoding = self._backend.encode_batch_fast([self._named(prompt)], add_special_tokens=add_special_tokens)[0]
        # Tokens that were added around the text have the other tokenizer's ids already.
        put_around = encoding.special_tokens_mask
        return [id_ if put else self._ids.get(id_, id_) for id_, put in zip(encoding.ids, put_around, strict=True)]

    def _named(self, prompt: ChatPrompt) -> str:
        pieces, at = [], 0
        for start, end in prompt.control or ():
            pieces += [prompt.text[at:start], self._names[prompt.text[start:end]]]
            at = end
        return "".join([*pieces, prompt.text[at:]])


def _with_name(token: tokenizers.AddedToken, name: str | None) -> tokenizers.AddedToken:
    """Returns the token with another name. `single_word` was checked before renaming, and the name may stand next to any text."""
    rules = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized, "special": token.special}
    return tokenizers.AddedToken(name or token.content, single_word=token.single_word and name is None, **rules)


def _with_model(model: tokenizers.models.Model, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (value := getattr(backend, part)) is not None:
            setattr(made, part, value)
    return made


def _makes_of_text(model: tokenizers.models.Model, spelling: str) -> bool:
    """Returns whether the model makes the control token of plain text: for Unigram it is a word of the vocabulary.

    The token for unknown text does not count: any text may become it.
    """
    id_ = model.token_to_id(spelling)
    return id_ is not None and spelling != getattr(model, "unk_token", None) and id_ in [t.id for t in model.tokenize(spelling)]


def _renamed(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.models.Model:
    """Returns a copy of the model with other names for the tokens, so that no text becomes one of them."""
    state = json.loads(backend.to_str())
    rename_in_model(state["model"], names)
    # Other sections could refer to the old names.
    renamed = tokenizers.Tokenizer.from_str(json.dumps({"version": state["version"], "model": state["model"], "added_tokens": []}))
    return cast("tokenizers.models.Model", renamed.model)
