"""Log probabilities in the forms of chats and of completions."""

from collections.abc import Sequence

from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.outputs import Logprob, TokenLogprobs

from starling_agent.openai.protocol.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

FLOOR = -9999.0
"""OpenAI's value for -inf, which JSON does not have."""


class LogprobWriter:
    """Makes answers of the engine's tables. `ids_as_text` writes a token as "token_id:7", which is unique."""

    def __init__(self, tokenizer: Tokenizer, ids_as_text: bool) -> None:
        self._tokenizer = tokenizer
        self._ids_as_text = ids_as_text

    def chat(self, tokens: Sequence[int], tables: Sequence[TokenLogprobs], top: int) -> ChatLogprobs:
        """Returns one entry for each token, with its `top` most likely candidates."""
        return ChatLogprobs([self._chat_entry(token, table, top) for token, table in zip(tokens, tables, strict=True)])

    def completion(
        self, tokens: Sequence[int], tables: Sequence[TokenLogprobs | None], top: int, offset: int
    ) -> CompletionLogprobs:
        """`offset` is the position of the first token's text in the choice's. A table is None if no token precedes its own."""
        answer = CompletionLogprobs([], [], [], [])
        for token, table in zip(tokens, tables, strict=True):
            entry = table.get(token) if table else None
            text = self._text(token, entry)
            answer.tokens.append(text)
            answer.token_logprobs.append(_finite(entry.logprob) if entry else None)
            answer.top_logprobs.append(self._candidates(token, table, top) if table else None)
            answer.text_offset.append(offset)
            offset += len(text)
        return answer

    def prompt(self, tables: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
        if tables is None:
            return None
        return [
            {str(token): self._prompt_entry(token, entry) for token, entry in _by_rank(table)} if table else None
            for table in tables
        ]

    def _prompt_entry(self, token: int, entry: Logprob) -> PromptLogprob:
        return PromptLogprob(_finite(entry.logprob), entry.rank, self._text(token, entry))

    def _chat_entry(self, token: int, table: TokenLogprobs, top: int) -> ChatLogprob:
        chosen = table[token]
        candidates = [
            TopLogprob(self._text(other, entry), _finite(entry.logprob), list(self._tokenizer.token_bytes(other)))
            for other, entry in _by_rank(table)[:top]
        ]
        raw = list(self._tokenizer.token_bytes(token))
        return ChatLogprob(self._text(token, chosen), _finite(chosen.logprob), raw, candidates)

    def _candidates(self, token: int, table: TokenLogprobs, top: int) -> dict[str, float]:
        """Returns the most likely candidates, and always the chosen token, as vLLM does."""
        ranked = _by_rank(table)
        kept = [pair for pair in ranked[:top] if pair[0] != token] + [pair for pair in ranked if pair[0] == token]
        # Two tokens may decode to one text; the likelier one comes first, and has the entry.
        answer: dict[str, float] = {}
        for other, entry in sorted(kept, key=lambda pair: pair[1].rank):
            answer.setdefault(self._text(other, entry), _finite(entry.logprob))
        return answer

    def _text(self, token: int, entry: Logprob | None) -> str:
        if self._ids_as_text:
            return f"token_id:{token}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self._tokenizer.token_text(token)


def _by_rank(table: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(table.items(), key=lambda pair: pair[1].rank)


def _finite(value: float) -> float:
    return max(value, FLOOR)
