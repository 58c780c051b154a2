"""/metrics under the names that dashboards and autoscalers know, and the histogram class."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starling_agent.metrics.exporter import CacheShape, EngineCollector, Exporter
from starling_agent.metrics.histogram import Histogram
from starling_agent.metrics.requests import RequestMetrics
from starling_engine.delta import Stats

COMPLETION = "/v1/completions"

NAMES = {
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:engine_sleep_state": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
}


def scrape(http):
    return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}


def value(http, name, **labels):
    families = scrape(http)
    samples = [s for family in families.values() for s in family.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_has_its_model_as_label(http, name):
    family = scrape(http)[name]
    assert family.type == NAMES[name]
    assert all(sample.labels["model_name"] == "pydoc" for sample in family.samples)


def test_metrics_describe_the_kv_cache(http):
    (sample,) = scrape(http)["vllm:cache_config_info"].samples
    assert (sample.labels["block_size"], sample.labels["cache_dtype"]) == ("16", "auto")
    assert int(sample.labels["num_gpu_blocks"]) > 100


def test_blocks_of_the_cache_are_of_tokens_whatever_lies_in_blocks() -> None:
    """Blocks times their size are the room for tokens of a state alone, too."""
    stats = Stats(kv_blocks=640, kv_blocks_used=160, kv_token_blocks=2560)
    text = Exporter(EngineCollector(lambda: stats, "mamba", CacheShape(16), RequestMetrics())).render().decode()
    assert 'block_size="16",cache_dtype="auto",model_name="mamba",num_gpu_blocks="2560"' in text
    assert 'vllm:kv_cache_usage_perc{model_name="mamba"} 0.25' in text


def test_routers_are_told_of_the_work_what_metrics_say(server, http):
    body = {"model": "pydoc", "prompt": "import os" * 20, "max_tokens": 2}
    assert [http.post(COMPLETION, json=body).status_code for _ in range(2)] == [200, 200]
    server.wait_until_idle()
    load = http.get("/backend").json()["load"]
    names = {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "prompt_tokens_total": "prompt_tokens_total",
        "generated_tokens_total": "generation_tokens_total",
        "prefix_queries_total": "prefix_cache_queries_total",
        "prefix_hits_total": "prefix_cache_hits_total",
    }
    assert {name: load.pop(name) for name in names} == {name: value(http, f"vllm:{metric}") for name, metric in names.items()}
    assert load.pop("kv_blocks_used") / load["kv_blocks"] == value(http, "vllm:kv_cache_usage_perc")
    (shape,) = scrape(http)["vllm:cache_config_info"].samples
    assert load == {"kv_blocks": int(shape.labels["num_gpu_blocks"])}
    assert http.get("/backend").json()["kv_free"] == load["kv_blocks"] * 16, "nothing runs"
    assert value(http, "vllm:prefix_cache_hits_total") > 0


def test_a_finished_request_is_counted(server, http):
    names = ("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count")
    before = [value(http, name) for name in names]
    finished = value(http, "vllm:request_success_total", finished_reason="length")
    generated = value(http, "vllm:generation_tokens_total")
    body = {"prompt": "import os", "max_tokens": 30, "ignore_eos": True}
    assert http.post(COMPLETION, json=body).status_code == 200
    server.wait_until_idle()
    first, gaps = (value(http, name) - old for name, old in zip(names, before, strict=True))
    assert first == 1
    assert 1 <= gaps <= 29, "tokens that came with the first have no gap"
    assert value(http, "vllm:request_success_total", finished_reason="length") == finished + 1
    assert value(http, "vllm:generation_tokens_total") == generated + 30


PHASES = [f"vllm:request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference")]


@pytest.mark.parametrize("ends", ["done", "searched", "aborted"])
def test_the_times_of_a_requests_phases_add_up(ends, server, http):
    names = [*PHASES, "vllm:e2e_request_latency_seconds"]
    server.wait_until_idle()
    before = [(value(http, f"{name}_count"), value(http, f"{name}_sum")) for name in names]
    body = {"prompt": "import os", "n": 2, "max_tokens": 20, "ignore_eos": True, "use_beam_search": ends == "searched"}
    if ends == "aborted":
        with http.stream("POST", COMPLETION, json={**body, "max_tokens": 2000, "stream": True}) as answer:
            next(answer.iter_lines())
        server.wait_until_idle()
    else:
        assert http.post(COMPLETION, json=body).status_code == 200
    after = [(value(http, f"{name}_count"), value(http, f"{name}_sum")) for name in names]
    assert [new - old for (new, _), (old, _) in zip(after, before, strict=True)] == [1] * 5
    queue, prefill, decode, inference, whole = (new - old for (_, new), (_, old) in zip(after, before, strict=True))
    assert min(queue, prefill, decode) > 0 and (ends != "searched" or decode > prefill)
    assert prefill + decode == pytest.approx(inference) and queue + inference == pytest.approx(whole)


def test_an_embedding_is_counted(http):
    names = ("vllm:e2e_request_latency_seconds_count", "vllm:request_prompt_tokens_count", "vllm:request_prompt_tokens_sum")
    before = [value(http, name) for name in names]
    stopped = value(http, "vllm:request_success_total", finished_reason="stop")
    assert http.post("/v1/embeddings", json={"input": [[5, 6, 7], [8, 9]]}).status_code == 200
    assert [value(http, name) - old for name, old in zip(names, before, strict=True)] == [2, 2, 5]
    assert value(http, "vllm:request_success_total", finished_reason="stop") == stopped + 2


def test_hits_of_the_prefix_cache_are_counted(server, http):
    body = {"prompt": "The prefix cache keeps what prompts share. " * 8, "max_tokens": 1}
    http.post(COMPLETION, json=body)
    server.wait_until_idle()
    before = value(http, "vllm:prefix_cache_hits_total")
    http.post(COMPLETION, json=body)
    server.wait_until_idle()
    assert value(http, "vllm:prefix_cache_hits_total") > before


def test_paths_do_not_become_labels(http):
    http.get("/v1/no-such-path-as-this")
    http.get("/v1/models/pydoc")
    text = http.get("/metrics").text
    assert "no-such-path" not in text
    assert re.search(r'starling:http_responses_total\{route="/v1/models/\{model:path\}",status="200"\}', text)


def test_probes_and_version_are_answered(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert re.match(r"\d+\.\d+", http.get("/version").json()["version"])


def test_the_api_page_describes_requests(http):
    assert "swagger" in http.get("/docs").text.lower()
    schema = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/tokenize"} <= schema["paths"].keys()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].removeprefix("#/components/schemas/")
    fields = schema["components"]["schemas"][name]["properties"]
    assert {"messages", "temperature", "top_k", "stream_options", "cache_salt"} <= fields.keys()
    for reference in re.findall(r'"\$ref": ?"([^"]+)"', http.get("/openapi.json").text):
        assert reference.removeprefix("#/components/schemas/") in schema["components"]["schemas"]


def samples(histogram):
    return {s.labels.get("le"): s.value for s in histogram.family({}).samples if s.name.endswith("_bucket")}


def test_a_histograms_buckets_are_cumulative_and_closed_above():
    histogram = Histogram("h", "help", (1, 2, 4))
    for seconds in (0.5, 1.0, 1.5, 4.0, 9.0):
        histogram.observe(seconds)
    histogram.observe(3.0, times=2)
    assert samples(histogram) == {"1.0": 2, "2.0": 3, "4.0": 6, "+Inf": 7}
    totals = {s.name: s.value for s in histogram.family({}).samples if s.name in ("h_sum", "h_count")}
    assert totals == {"h_sum": 22.0, "h_count": 7}


def test_the_state_that_routers_read_says_how_much_a_step_has_room_for(http):
    assert 0 < http.get("/backend").json()["step_tokens"] <= 2048
