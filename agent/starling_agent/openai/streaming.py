"""Encodes a generation as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starling_engine.outputs import OutputDelta, StreamDelta

from starling_agent.openai.answer_parts import AnswerReader, CallPiece, Piece
from starling_agent.openai.chunks import CHAT, DONE, ChoiceShape, ChunkWriter
from starling_agent.openai.generation import Generation, PromptDelta
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.protocol.answers import CompletionLogprobs, Usage, make_usage
from starling_agent.openai.stream_batcher import StreamBatcher
from starling_agent.parsers.events import Arguments, Content, Reasoning


class StreamEncoder:
    """Makes chunks of deltas. One delta gives one write, also if it has both text and the end."""

    __slots__ = (
        "_batcher",
        "_begun",
        "_count",
        "_generation",
        "_logprobs",
        "_offsets",
        "_readers",
        "_rich",
        "_shape",
        "_unfinished",
        "_writer",
    )

    def __init__(self, generation: Generation, shape: ChoiceShape, logprobs: LogprobWriter, batcher: StreamBatcher) -> None:
        self._generation = generation
        self._batcher = batcher
        self._unfinished = generation.num_choices
        self._shape = shape
        self._logprobs = logprobs
        self._writer = ChunkWriter(
            shape, generation.answer_id, generation.created, generation.model, usage_field=generation.include_usage
        )
        self._count = generation.token_count()
        self._rich = generation.top_logprobs is not None or generation.return_token_ids or generation.continuous_usage
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        reading = generation.reading
        self._readers = [] if reading is None else [AnswerReader(reading) for _ in range(generation.num_choices)]

    async def chunks(self, deltas: AsyncGenerator[PromptDelta]) -> AsyncGenerator[bytes]:
        """Yields all events up to [DONE]; no chunk is empty."""
        with self._batcher.open_stream():
            async with aclosing(deltas):
                async for prompt, delta in deltas:
                    chunk = self._encode(prompt, delta)
                    if not self._unfinished:
                        yield chunk + self._ending()
                        return
                    if chunk:
                        yield chunk
                        await self._batcher.pause()

    def _encode(self, prompt: int, delta: StreamDelta) -> bytes:
        self._count.add(prompt, delta, self._generation.only_echo)
        parts: list[bytes] = []
        if prompt not in self._begun:
            self._begun.add(prompt)
            parts += self._opening(prompt, delta)
        first = prompt * self._generation.params.n
        for output in delta.outputs:
            index = first + output.index
            if self._readers:
                self._pieces(index, output, parts)
            elif not self._generation.only_echo:
                self._text(index, output, parts)
            if output.finish_reason is not None:
                self._unfinished -= 1
                reason = self._readers[index].ended_by(output.finish_reason) if self._readers else output.finish_reason
                parts.append(self._writer.finish(index, reason, output.stop_reason, self._continuous_usage()))
        return b"".join(parts)

    def _pieces(self, index: int, output: OutputDelta, parts: list[bytes]) -> None:
        """Adds chunks for what the output's text completes."""
        reader = self._readers[index]
        if self._rich:
            self._rich_pieces(index, output, reader.read(output), parts)
            return
        text, kind = output.text, reader.steady_kind(output)  # nearly all: nothing else of the reader is touched then
        if kind is Arguments:
            parts.append(self._writer.arguments(index, reader.calls - 1, text))
        elif kind is Content:
            parts.append(self._writer.text(index, text))
        elif kind is Reasoning:
            parts.append(self._writer.reasoning(index, text))
        else:
            parts += [self._piece(index, piece) for piece in reader.read(output)]

    def _piece(self, index: int, piece: Piece) -> bytes:
        """Returns a chunk with nothing but a piece of the answer."""
        match piece:
            case CallPiece():
                if piece.id is None and not piece.is_custom:
                    return self._writer.arguments(index, piece.index, piece.arguments)
                return self._writer.delta(index, _piece_delta(piece), logprobs=None, extra={}, usage=None)
            case Content():
                return self._writer.text(index, piece.text)
            case Reasoning():
                return self._writer.reasoning(index, piece.text)

    def _rich_pieces(self, index: int, output: OutputDelta, pieces: list[Piece], parts: list[bytes]) -> None:
        """Adds chunks, of which the first one has what belongs to all of the output's tokens."""
        extra: dict[str, object] = {"token_ids": output.token_ids} if self._generation.return_token_ids else {}
        logprobs = self._output_logprobs(index, output)
        deltas = [_piece_delta(piece) for piece in pieces]
        if not deltas and output.token_ids and (extra or logprobs is not None or self._generation.continuous_usage):
            deltas = [{}]
        for delta in deltas:
            usage = self._continuous_usage()
            parts.append(self._writer.delta(index, delta, logprobs=logprobs, extra=extra, usage=usage))
            logprobs, extra = None, {}

    def _text(self, index: int, output: OutputDelta, parts: list[bytes]) -> None:
        if not self._rich:
            if output.text:
                parts.append(self._writer.text(index, output.text))
        elif output.text or output.token_ids:
            parts.append(self._rich_text(index, output))

    def _opening(self, prompt: int, delta: StreamDelta) -> list[bytes]:
        """Returns the chunks before the first token: a chat's role, an echoed prompt."""
        generation = self._generation
        n = generation.params.n
        prefix = generation.prefixes[prompt]
        table = self._echoed_logprobs(delta) if prefix else None
        parts = []
        for index in range(prompt * n, (prompt + 1) * n):
            if self._shape is CHAT:
                parts.append(self._writer.role(index, delta.prompt_token_ids if generation.return_token_ids else None))
            if prefix:
                self._offsets[index] = len(prefix)
                usage = self._continuous_usage()
                parts.append(self._writer.rich_text(index, prefix, logprobs=table, extra={}, usage=usage))
        return parts

    def _echoed_logprobs(self, delta: StreamDelta) -> CompletionLogprobs | None:
        """Returns the echoed prompt's table for all its choices: it may be megabytes."""
        top = self._generation.top_logprobs
        if self._shape is CHAT or top is None or delta.prompt_logprobs is None:
            return None
        return self._logprobs.completion(delta.prompt_token_ids, delta.prompt_logprobs, top, 0)

    def _rich_text(self, index: int, output: OutputDelta) -> bytes:
        extra: dict[str, object] = {"token_ids": output.token_ids} if self._generation.return_token_ids else {}
        logprobs = self._output_logprobs(index, output)
        return self._writer.rich_text(index, output.text, logprobs=logprobs, extra=extra, usage=self._continuous_usage())

    def _output_logprobs(self, index: int, output: OutputDelta) -> object:
        top = self._generation.top_logprobs
        if top is None or output.logprobs is None:
            return None
        if self._shape is CHAT:
            return self._logprobs.chat(output.token_ids, output.logprobs, top)
        offset = self._offsets.get(index, 0)
        table = self._logprobs.completion(output.token_ids, output.logprobs, top, offset)
        self._offsets[index] = _end_offset(table, offset)
        return table

    def _ending(self) -> bytes:
        return (self._writer.usage(self._usage()) if self._generation.include_usage else b"") + DONE

    def _usage(self) -> Usage:
        count = self._count
        reasoning = sum(reader.reasoning_tokens for reader in self._readers) if self._readers else None
        return make_usage(count.prompt, count.completion, count.cached, count.drafts, reasoning)

    def _continuous_usage(self) -> Usage | None:
        return self._usage() if self._generation.continuous_usage else None


def _piece_delta(piece: Piece) -> dict[str, object]:
    """Returns the delta of a chat's chunk."""
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallPiece(index, arguments, call_id, name, is_custom):
            kind, said = ("custom", {"input": arguments}) if is_custom else ("function", {"arguments": arguments})
            call = {kind: said} if call_id is None else {"id": call_id, "type": kind, kind: {"name": name, **said}}
            return {"tool_calls": [{"index": index, **call}]}


def _end_offset(table: CompletionLogprobs, offset: int) -> int:
    return table.text_offset[-1] + len(table.tokens[-1]) if table.tokens else offset
