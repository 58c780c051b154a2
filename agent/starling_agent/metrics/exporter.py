"""GET /metrics: counters of the engine core and of the endpoint. vLLM's dashboards know most of the names."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starling_engine import native
from starling_engine.delta import Stats
from starling_engine.topology.epoch import CHECKPOINT, PEERS

from starling_agent.metrics.requests import RequestMetrics
from starling_agent.metrics.tiers import tier_metrics

SLEEP_STATES = {"awake": 0, "weights_offloaded": 1, "discard_all": 2}
"""vLLM's names of the sleep levels."""


class CacheShape(NamedTuple):
    """The KV cache as it was configured: `dtype` is `--kv-cache-dtype`, with vLLM's names."""

    block_size: int
    dtype: str = "auto"


def no_engine() -> int | None:
    """Returns the sleep level of a node without an engine."""


class EngineCollector(Collector):
    """Reads the newest Stats at each scrape.

    `sleep_level` returns the engine's, or None while there is no engine; then no sleep state is 1.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        model_name: str,
        cache: CacheShape,
        requests: RequestMetrics,
        sleep_level: Callable[[], int | None] = no_engine,
    ) -> None:
        self._stats = stats
        self._sleep_level = sleep_level
        self._labels = {"model_name": model_name}
        self._cache = cache
        self._requests = requests

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from tier_metrics(stats.tiers, self._labels)
        for histogram in self._requests.histograms():
            yield histogram.family(self._labels)

    def _gauges(self, stats: Stats) -> Iterable[Metric]:
        used = stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests that run.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", used)
        yield self._sleep_state(self._sleep_level())
        text = "Sizes of steps that the device could not record, and launches kernel by kernel."
        yield self._gauge("starling:steps_not_recorded", text, stats.steps_not_recorded)
        yield self._gauge("starling:kv_blocks_used", "Blocks of the KV cache that requests hold.", stats.kv_blocks_used)
        labels = [*self._labels, "block_size", "cache_dtype", "num_gpu_blocks"]
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's shape.", labels=labels)
        info.add_metric([*self._labels.values(), str(self._cache.block_size), self._cache.dtype, str(stats.kv_token_blocks)], 1)
        yield info
        labels = [*self._labels, "instruction_set"]
        cpu = GaugeMetricFamily("starling:cpu_info", "The instruction set of the native CPU kernels.", labels=labels)
        cpu.add_metric([*self._labels.values(), native.instruction_set_name()], 1)
        yield cpu
        if stats.eplb_balance:  # one node of those that share experts has it, if EPLB is on
            yield self._gauge("starling:eplb_balance", "Mean by most tokens of a rank of late; 1 is best.", stats.eplb_balance)
        if stats.eplb_rearrangements_total:
            text = "As starling:eplb_balance, for which experts were moved last."
            yield self._gauge("starling:eplb_balance_before", text, stats.eplb_balance_before)
            text = "What to expect of the same load after that."
            yield self._gauge("starling:eplb_balance_after", text, stats.eplb_balance_after)

    def _counters(self, stats: Stats) -> Iterable[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens_total)
        yield self._counter("vllm:num_preemptions", "Requests preempted because the KV cache was full.", stats.preemptions_total)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries_total)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits_total)
        text = "Tokens that the prefix cache lacks, looked up in the tiers."
        yield self._counter("vllm:external_prefix_cache_queries", text, stats.external_queries_total)
        yield self._counter("vllm:external_prefix_cache_hits", "Tokens found in the tiers.", stats.external_hits_total)
        yield from self._speculation(stats)
        text = "Tokens that took no step of their own, because a grammar allowed no other."
        yield self._counter("starling:jump_forward_tokens", text, stats.jump_forward_tokens_total)
        text = "Kernels that were compiled, or loaded, while serving."
        yield self._counter("starling:kernels_compiled", text, stats.kernels_compiled_total)
        text = "Steps of prompts whose attention a library computed, which the log of the start names."
        yield self._counter("starling:library_attention_steps", text, stats.library_steps_total)
        yield self._counter("starling:engine_steps", "Steps of the engine.", stats.steps_total)
        yield self._counter("starling:eplb_rearrangements", "Changes of where experts lie.", stats.eplb_rearrangements_total)
        yield self._counter("starling:eplb_experts_moved", "Experts that ranks loaded for them.", stats.eplb_experts_moved_total)
        yield self._counter("starling:eplb_seconds", "Seconds from their beginnings to their ends.", stats.eplb_seconds_total)
        loaded = CounterMetricFamily(
            "starling:elastic_expert_bytes", "Of experts that ranks loaded for changes of size.", labels=[*self._labels, "source"]
        )
        for source, size in ((PEERS, stats.epoch_peer_bytes_total), (CHECKPOINT, stats.epoch_checkpoint_bytes_total)):
            loaded.add_metric([*self._labels.values(), source], size)
        yield loaded
        finished = CounterMetricFamily(
            "vllm:request_success", "Ended requests by how they ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self._requests.finished.items():
            finished.add_metric([*self._labels.values(), reason], count)
        yield finished
        responses = CounterMetricFamily("starling:http_responses", "HTTP answers.", labels=["route", "status"])
        for (route, status), count in self._requests.responses.items():
            responses.add_metric([route, str(status)], count)
        yield responses

    def _speculation(self, stats: Stats) -> Iterable[Metric]:
        yield self._counter("vllm:spec_decode_num_drafts", "Rows of steps that had draft tokens.", stats.spec_drafts_total)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", stats.spec_draft_tokens_total)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.spec_accepted_tokens_total)
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            labels=[*self._labels, "position"],
        )
        for position, count in enumerate(stats.spec_accepted_per_position):
            accepted.add_metric([*self._labels.values(), str(position)], count)
        yield accepted

    def _sleep_state(self, now: int | None) -> GaugeMetricFamily:
        text = "1 for the state that the engine is in: awake, or asleep at level 1 (weights_offloaded) or 2 (discard_all)."
        family = GaugeMetricFamily("vllm:engine_sleep_state", text, labels=[*self._labels, "sleep_state"])
        for name, level in SLEEP_STATES.items():
            family.add_metric([*self._labels.values(), name], now == level)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


class Exporter:
    """Renders the registry in Prometheus' text format."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, *collectors: Collector) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)
