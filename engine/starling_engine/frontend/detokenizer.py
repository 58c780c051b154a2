"""Turns an output's tokens into text that is safe to show, up to the first stop string."""

from collections.abc import Collection, Sequence

from starling_engine.frontend.stop_strings import first_stop, longest_beginning
from starling_engine.frontend.text_stream import text_stream
from starling_engine.frontend.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Returns text as soon as it can no longer be part of a character or of a stop string.

    The stop string that is complete first ends the output, however the text is cut into tokens or pushes. If several end with the
    same character, the longest counts. It is left out of the text unless `include_stop`. One that is complete within the first
    `min_tokens` tokens does not count. Without `prompt_ids` the text reads as if nothing preceded it.

    `kept` is the number of tokens of the last push that belong to the output: all, or those up to the end of the stop string.
    `shown_offsets` are the offsets in the text, from its first character on, of the tokens in `shown_ids`. These are shown even if
    they are special tokens that are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        shown_ids: Collection[int] = (),
    ) -> None:
        self.kept = 0
        self.shown_offsets: list[int] = []
        self._stream = text_stream(tokenizer, skip_special_tokens, prompt_ids, shown_ids)
        self._shown = {token_id: len(tokenizer.token_text(token_id)) for token_id in shown_ids}
        self._feed = self._feed_locating if self._shown else self._stream.feed
        self._fed = 0
        self._stops = tuple(stop)
        self._include_stop = include_stop
        self._ignored_tokens = min_tokens
        self._held = ""

    def push(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        """Returns the text that became safe to show, and the stop string if one is complete: then nothing more may be pushed.

        `finished`: no token follows, so that nothing is held back.
        """
        self.kept = len(token_ids)
        if not self._stops:
            text = self._text(token_ids)
            return (text + self._stream.finish() if finished else text), None
        return self._push_watching(token_ids, finished)

    def _text(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and token_ids[0] not in self._shown:  # nearly always
            text = self._stream.feed(token_ids[0])
            self._fed += len(text)
            return text
        if not self._shown.keys().isdisjoint(token_ids):
            return "".join([self._feed_locating(token_id) for token_id in token_ids])
        feed = self._stream.feed
        text = "".join([feed(token_id) for token_id in token_ids])
        self._fed += len(text)
        return text

    def _push_watching(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            counts = self._ignored_tokens <= 0
            self._ignored_tokens -= 1
            text, stop = self._watch(self._feed(token_id), counts)
            shown.append(text)
            if stop is not None:
                self.kept = count
                return "".join(shown), stop
        if not finished:
            return "".join(shown), None
        text, stop = self._watch(self._stream.finish(), self._ignored_tokens < 0)
        held, self._held = self._held, ""
        return "".join([*shown, text, held]), stop

    def _feed_locating(self, token_id: int) -> str:
        text = self._stream.feed(token_id)
        self._fed += len(text)
        if token_id in self._shown:
            self.shown_offsets.append(self._fed - self._shown[token_id])
        return text

    def _watch(self, new: str, counts: bool) -> tuple[str, str | None]:
        """Returns the text to show after `new` came, and the stop string in it."""
        if not new:
            return "", None
        text = self._held + new
        if counts and (found := first_stop(text, self._stops, len(self._held))):
            start, stop = found
            self._held = ""
            return text[: start + len(stop) if self._include_stop else start], stop
        held = longest_beginning(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None
