"""Assembles the deltas of a request's sequences into the output that the caller gets."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import cast

from starling_engine.delta import Delta
from starling_engine.frontend.detokenizer import IncrementalDetokenizer
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.outputs import (
    REPETITION_DETECTED,
    CompletionOutput,
    DraftCount,
    EarlierOutput,
    EarlierRun,
    FinishReason,
    Logprob,
    OutputDelta,
    RequestOutput,
    StreamDelta,
    TokenLogprobs,
)
from starling_engine.params import SamplingParams
from starling_engine.step import LogprobRow


class Assembler:
    """Collects the deltas of the `n` sequences of one request.

    `take` returns the gains since its last call; `output` returns all so far, and only with `cumulative=True`. Both may be used in
    turn. Later deltas do not change results that the caller has.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        cumulative: bool = False,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._cumulative = cumulative
        self._text_source = tokenizer if params.detokenize else None
        self._sequences = [_Sequence(index, prompt_ids, params, tokenizer) for index in range(params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] if params.prompt_logprobs is not None else None
        self._untaken_prompt_logprobs = self._prompt_logprobs
        self._cached_tokens: int | None = None
        self._queue_seconds: float | None = None
        self._drafts = DraftCount()

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self._sequences)

    def replay(self, earlier: EarlierRun) -> StreamDelta | None:
        """Begins with what an earlier run had, as one push of each sequence. Returns it, or None if that is nothing."""
        for index, output in enumerate(earlier.outputs):
            self._sequences[index].push(_replayed(output))
        if earlier.outputs[0].token_ids:  # it came with the first delta of the first sequence
            self._cached_tokens = earlier.num_cached_tokens
        self._drafts = earlier.drafts
        gains = self.take()
        if gains is not None:
            gains.num_cached_tokens, gains.replayed = earlier.num_cached_tokens, True
        return gains

    def is_finished(self, index: int) -> bool:
        return self._sequences[index].finish_reason is not None

    def push(self, index: int, delta: Delta) -> bool:
        """Adds a delta of sequence `index`. Returns True when the core must abort it, because a stop string ended it here.

        Further deltas of a sequence that has ended are ignored.
        """
        if self._cached_tokens is None and index == 0:  # the first core's count, not that of one which takes over
            self._cached_tokens = delta.cached_tokens
        if self._queue_seconds is None and index == 0:
            self._queue_seconds = delta.queue_seconds
        if delta.num_draft_tokens:
            drafts = self._drafts
            self._drafts = DraftCount(drafts.proposed + delta.num_draft_tokens, drafts.accepted + delta.num_accepted_tokens)
        if self._prompt_logprobs is not None and index == 0:
            self._prompt_logprobs += [with_texts(row, self._text_source) for row in delta.prompt_logprobs or ()]
        return self._sequences[index].push(delta)

    def take(self) -> StreamDelta | None:
        """Returns all gains since the last call, or None. The first ones have the prompt's logprobs."""
        gained = [output for sequence in self._sequences if (output := sequence.take(cumulative=self._cumulative))]
        if not gained:
            return None
        # They come with the first sequence's first token; its forks' tokens may come before.
        prompt_logprobs = self._untaken_prompt_logprobs if gained[0].index == 0 else None
        if prompt_logprobs is not None:
            self._untaken_prompt_logprobs = None
        return StreamDelta(
            request_id=self.request_id,
            prompt_token_ids=self._prompt_ids,
            outputs=gained,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._cached_tokens or 0,
            drafts=self._drafts,
            queue_seconds=self._queue_seconds,
        )

    def output(self) -> RequestOutput:
        """Returns the whole output so far."""
        assert self._cumulative, "only an Assembler(cumulative=True) remembers everything"
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=[sequence.output() for sequence in self._sequences],
            finished=self.finished,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_cached_tokens=self._cached_tokens or 0,
            drafts=self._drafts,
            queue_seconds=self._queue_seconds,
        )


class _Sequence:
    """An output. Text and tokens that were taken are dropped, or stay before `_taken_*` if the output is cumulative."""

    def __init__(self, index: int, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._stop_reason: int | str | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        self._cumulative_logprob = 0.0
        self._taken_chars = 0
        self._taken_tokens = 0
        self._end_taken = False
        self._shows_stop_token = params.include_stop_str_in_output
        self._text_source = tokenizer if params.detokenize else None
        self._detokenizer = _detokenizer(params, tokenizer, prompt_ids) if params.detokenize else None
        self._dropped_chars = 0
        """Characters that were taken and dropped."""

    def push(self, delta: Delta) -> bool:
        if self.finish_reason is not None:
            return False
        kept, stop_string = self._push_text(delta)
        self._token_ids += delta.tokens[:kept]
        if self._logprobs is not None:
            self._push_logprobs((delta.logprobs or [])[:kept])
        if stop_string is not None:
            self.finish_reason, self._stop_reason = "stop", stop_string
        elif delta.finish_reason is not None:
            self.finish_reason = cast(FinishReason, delta.finish_reason)
            self._stop_reason = REPETITION_DETECTED if delta.finish_reason == "repetition" else delta.stop_token
        return stop_string is not None and delta.finish_reason is None

    def take(self, *, cumulative: bool) -> OutputDelta | None:
        tokens = self._token_ids[self._taken_tokens :]
        text = self._text[self._taken_chars :]
        ends = self.finish_reason is not None and not self._end_taken
        if not tokens and not text and not ends:
            return None
        logprobs = None if self._logprobs is None else self._logprobs[self._taken_tokens :]
        offsets = self._offsets_in(text)
        self._end_taken = ends
        self._mark_taken(cumulative=cumulative)
        return OutputDelta(
            index=self._index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            shown_offsets=offsets,
        )

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=list(self._token_ids),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _push_text(self, delta: Delta) -> tuple[int, str | None]:
        """Adds the delta's text. Returns the number of its tokens that belong to the output, and the stop string that ended it."""
        if self._detokenizer is None:
            return len(delta.tokens), None
        # The token that stopped it (end of sequence, or a stop token of the caller) is one of the tokens, but not in the text.
        hides_last = delta.finish_reason == "stop" and not (delta.last_is_text or self._shows_stop_token)
        visible = delta.tokens[:-1] if hides_last else delta.tokens
        text, stop_string = self._detokenizer.push(visible, finished=delta.finish_reason is not None)
        self._text += text
        return (len(delta.tokens) if stop_string is None else self._detokenizer.kept), stop_string

    def _push_logprobs(self, rows: Sequence[LogprobRow]) -> None:
        assert self._logprobs is not None
        self._cumulative_logprob += sum(row.logprobs[0] for row in rows)
        self._logprobs += [with_texts(row, self._text_source) for row in rows]

    def _offsets_in(self, text: str) -> list[int]:
        """Returns the offsets of shown tokens in text that is being taken."""
        if self._detokenizer is None or not self._detokenizer.shown_offsets:
            return []
        begin = self._dropped_chars + self._taken_chars
        offsets = self._detokenizer.shown_offsets
        count = bisect_left(offsets, begin + len(text))
        taken = [offset - begin for offset in offsets[:count]]
        del offsets[:count]
        return taken

    def _mark_taken(self, *, cumulative: bool) -> None:
        if cumulative:
            self._taken_chars, self._taken_tokens = len(self._text), len(self._token_ids)
            return
        self._dropped_chars += len(self._text)
        self._text, self._token_ids = "", []
        self._logprobs = None if self._logprobs is None else []


def _replayed(output: EarlierOutput) -> Delta:
    """Returns an earlier output as a core's delta. Log probabilities are not known any more, and nobody gets them again."""
    return Delta(
        id="",
        tokens=output.token_ids,
        logprobs=[LogprobRow([token], [0.0], 1) for token in output.token_ids],
        finish_reason=output.finish_reason,
        stop_token=output.stop_reason if isinstance(output.stop_reason, int) else None,
        last_is_text=isinstance(output.stop_reason, str),
    )


def with_texts(row: LogprobRow, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """Returns the row by token id, the chosen token first and then the likeliest; with texts unless `tokenizer` is None."""
    by_token: TokenLogprobs = {}
    for index, (token_id, logprob) in enumerate(zip(row.token_ids, row.logprobs, strict=True)):
        if token_id not in by_token:
            text = None if tokenizer is None else tokenizer.token_text(token_id)
            by_token[token_id] = Logprob(logprob, row.rank if index == 0 else index, text)
    return by_token


def _detokenizer(params: SamplingParams, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer,
        stop=params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        prompt_ids=prompt_ids,
        shown_ids=params.shown_token_ids or (),
    )
