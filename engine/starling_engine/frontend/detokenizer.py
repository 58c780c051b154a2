"""One output's tokens to text that is safe to show, up to the first stop string."""

from collections.abc import Sequence

from starling_engine.frontend.text_stream import text_stream
from starling_engine.frontend.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Gives text as soon as it can no longer be part of a character or of a stop string.

    The stop string that is complete first ends the output, wherever the text is cut into tokens or pushes; of several that are
    complete with the same character the longest. It is left out of the text unless `include_stop`. One that is complete within
    the first `min_tokens` tokens does not count. Unless `prompt_ids` are given, the text reads as if nothing preceded it.

    `kept` tells how many tokens of the last push belong to the output: all of them, or those up to the one that completed the
    stop string.
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
    ) -> None:
        self.kept = 0
        self._stream = text_stream(tokenizer, skip_special_tokens, prompt_ids)
        self._stops = tuple(stop)
        self._include_stop = include_stop
        self._ignored_tokens = min_tokens
        self._held = ""

    def push(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        """The text that became safe to show, and the stop string if one is complete: then nothing more may be pushed.

        `finished` says that no token follows, so that nothing needs to be held back.
        """
        self.kept = len(token_ids)
        feed = self._stream.feed
        if not self._stops:
            text = "".join([feed(token_id) for token_id in token_ids])
            return (text + self._stream.finish() if finished else text), None
        return self._push_watching(token_ids, finished)

    def _push_watching(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            counts = self._ignored_tokens <= 0
            self._ignored_tokens -= 1
            text, stop = self._watch(self._stream.feed(token_id), counts)
            shown.append(text)
            if stop is not None:
                self.kept = count
                return "".join(shown), stop
        if not finished:
            return "".join(shown), None
        text, stop = self._watch(self._stream.finish(), self._ignored_tokens < 0)
        held, self._held = self._held, ""
        return "".join([*shown, text, held]), stop

    def _watch(self, new: str, counts: bool) -> tuple[str, str | None]:
        """Text to show after `new` came, and the stop string in it."""
        if not new:
            return "", None
        text = self._held + new
        if counts and (found := first_stop(text, self._stops, len(self._held))):
            start, stop = found
            self._held = ""
            return text[: start + len(stop) if self._include_stop else start], stop
        keep = longest_beginning(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def first_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, str] | None:
    """Where the stop string that is complete first begins, and which it is; the longest if several end together.

    Those that end within the first `after` characters have had their chance.
    """
    starts = [(text.find(stop, max(0, after - len(stop) + 1)), stop) for stop in stops]
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    return min(found)[1:] if found else None


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins, and does not complete, a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
