"""Metrics of the endpoint itself: latencies and ends of requests."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import cast, get_args

from starling_engine.outputs import FinishReason, StreamDelta

from starling_agent.metrics.histogram import E2E_BUCKETS, ITL_BUCKETS, TOKEN_BUCKETS, TTFT_BUCKETS, Histogram


class RequestMetrics:
    """Histograms and counters of requests; only the event loop writes them."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = Histogram(
            "vllm:inter_token_latency_seconds", "Seconds between an output's tokens, one observation a token.", ITL_BUCKETS
        )
        self.time_per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean seconds per token after its first.", ITL_BUCKETS
        )
        self.e2e_latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", E2E_BUCKETS
        )
        self.queue_time = Histogram(
            "vllm:request_queue_time_seconds", "Seconds that requests with a token waited for their first step.", E2E_BUCKETS
        )
        self.prefill_time = Histogram(
            "vllm:request_prefill_time_seconds", "Seconds from a request's first step to its first token.", E2E_BUCKETS
        )
        self.decode_time = Histogram(
            "vllm:request_decode_time_seconds", "Seconds from a request's first token to its end.", E2E_BUCKETS
        )
        self.inference_time = Histogram(
            "vllm:request_inference_time_seconds", "Seconds from a request's first step to its end.", E2E_BUCKETS
        )
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", "Prompt tokens of finished requests.", TOKEN_BUCKETS)
        self.generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Generated tokens of finished requests.", TOKEN_BUCKETS
        )
        self.finished: Counter[str] = Counter(dict.fromkeys(get_args(FinishReason), 0))
        self.responses: Counter[tuple[str, int]] = Counter()

    def histograms(self) -> list[Histogram]:
        return [
            self.time_to_first_token,
            self.inter_token_latency,
            self.time_per_output_token,
            self.e2e_latency,
            self.queue_time,
            self.prefill_time,
            self.decode_time,
            self.inference_time,
            self.prompt_tokens,
            self.generation_tokens,
        ]

    async def measured(self, stream: AsyncIterator[StreamDelta]) -> AsyncGenerator[StreamDelta]:
        """Times a stream. Closing it closes the engine's stream, which aborts the request there."""
        clock = _RequestClock(self)
        try:
            async with aclosing(cast("AsyncGenerator[StreamDelta]", stream)) as source:
                async for delta in source:
                    clock.on_delta(delta)
                    yield delta
        except Exception:
            clock.on_end("error")
            raise
        finally:
            clock.on_end("abort")

    @contextmanager
    def pooling(self, num_tokens: int) -> Iterator[None]:
        """Times a prompt of `num_tokens` that becomes a vector; it generates no tokens."""
        began = time.monotonic()
        reason = "error"
        try:
            yield
            reason = "stop"
            self.prompt_tokens.observe(num_tokens)
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            self.finished[reason] += 1
            self.e2e_latency.observe(time.monotonic() - began)


class _RequestClock:
    """Times one engine request with its n outputs."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._queued: float | None = None
        self._last: dict[int, float] = {}
        self._prompt = 0
        self._generated = 0
        self._done = False

    def on_delta(self, delta: StreamDelta) -> None:
        if delta.replayed:
            self._done = delta.finished  # all of it was counted elsewhere
            return
        now = time.monotonic()
        self._queued = delta.queue_seconds
        if self._first is None:
            self._first = now
            self._prompt = len(delta.prompt_token_ids)
            self._metrics.time_to_first_token.observe(now - self._arrival)
        for output in delta.outputs:
            count = len(output.token_ids)
            self._generated += count
            last = self._last.get(output.index)
            if count:
                if last is not None:
                    self._metrics.inter_token_latency.observe((now - last) / count, count)
                self._last[output.index] = now
            if output.finish_reason is not None:
                self._metrics.finished[output.finish_reason] += 1
        if delta.finished:
            self._finish(now)
            self._observe_phases(now, delta.first_token_seconds)

    def on_end(self, reason: str) -> None:
        """Counts the end of a stream; before its last delta that is an abort or an error."""
        if not self._done:
            self._done, now = True, time.monotonic()
            self._metrics.finished[reason] += 1
            self._metrics.e2e_latency.observe(now - self._arrival)
            self._observe_phases(now)

    def _finish(self, now: float) -> None:
        self._done = True
        metrics = self._metrics
        metrics.e2e_latency.observe(now - self._arrival)
        metrics.prompt_tokens.observe(self._prompt)
        metrics.generation_tokens.observe(self._generated)
        # Without a time between tokens, as when all come at once, there is nothing to measure.
        if self._first is not None and self._first < now and self._generated > 1:
            metrics.time_per_output_token.observe((now - self._first) / (self._generated - 1))

    def _observe_phases(self, now: float, first_token_seconds: float | None = None) -> None:
        """Counts the times of a request that has ended, which add up to its latency. One without a token has none that are known.

        `first_token_seconds` are given where the first token came before its delta.
        """
        if self._first is None or self._queued is None:
            return
        first = self._first if first_token_seconds is None else min(self._arrival + first_token_seconds, self._first)
        metrics, queued = self._metrics, min(self._queued, first - self._arrival)
        metrics.queue_time.observe(queued)
        metrics.prefill_time.observe(first - self._arrival - queued)
        metrics.decode_time.observe(now - first)
        metrics.inference_time.observe(now - self._arrival - queued)
