"""The `starling` command: quick to help, plain about failures."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starling_cli.benchmark.acceptance import accepted_between, counts_in
from starling_cli.commands.failures import fix_for
from starling_cli.commands.serve import parse_rate
from starling_cli.commands.vllm_flags import INSTEAD
from starling_engine.errors import ConfigError, EngineDead, ModelError, ModelPackageError, UnsupportedModel, WeightError

from tests import fork_server

REPOSITORY = Path(__file__).parents[2]
MODEL = "models/starling-pydoc"
WHOLE = pytest.mark.whole
HEAVY = ("torch", "transformers", "openai", "fastapi", "uvicorn", "httpx", "kopf", "kubernetes", "zmq", "rich.markdown")


def starling(*arguments: str, environment: dict[str, str] | None = None, **more) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "starling_cli.main", *arguments]
    everything = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(environment or {})}
    return subprocess.run(command, cwd=REPOSITORY, env=everything, capture_output=True, text=True, timeout=90, **more)


def failing(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs `starling serve`, which will not serve: the engine's process is a fork, for it starts to import torch all the same."""
    return starling("serve", *arguments, environment=fork_server.environment())


def test_help_loads_nothing_heavy():
    code = (
        "import sys, starling_cli.main as cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "serve" in answer.stdout
    assert answer.stdout.strip().endswith("LOADED []")


def test_the_core_starts_before_the_endpoints_modules_are_imported():
    heavy = (*HEAVY, "structlog", "pydantic")
    code = (
        "import sys, starling_cli.main as cli\n"
        "from starling_engine.core import launcher\n"
        f"launcher.start_ahead = lambda: sys.exit(str([name for name in {heavy!r} if name in sys.modules]))\n"
        "cli.app(['serve', 'models/none'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert answer.stderr == "[]\n"


def test_version():
    assert re.fullmatch(r"starling \d+\.\d+\S*\n", starling("--version").stdout)


@pytest.mark.parametrize("command", [["serve"], ["agent"], ["chat"], ["bench"], ["bench", "serve"], ["bench", "latency"]])
def test_each_command_has_help(command):
    answer = starling(*command, "--help")
    assert answer.returncode == 0
    assert "Usage:" in answer.stdout


def test_vllms_flags_are_known_and_whole_in_a_narrow_terminal():
    text = starling("serve", "--help", environment={"COLUMNS": "80"}).stdout
    assert text.index("\nModel:") < text.index("\nEndpoint:") < text.index("\nScheduling:")
    assert text.count("--help") == 1 and INSTEAD.keys().isdisjoint(re.findall(r"--[a-z-]+", text))
    for flag in (
        "--trust-request-chat-template",
        "--served-model-name",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--kv-cache-memory-bytes",
        "--gpu-memory-utilization",
        "--no-enable-prefix-caching",
        "--tensor-parallel-size",
        "--scheduling-policy",
        "--kv-cpu-bytes",
        "--kv-fs-path",
        "--kv-store",
    ):
        assert flag in text


@pytest.mark.parametrize(
    ("arguments", "cause", "fix"),
    [
        (["/no/such/model"], "/no/such/model", "model"),
        ([MODEL, "--tensor-parallel-size", "3"], "3 ranks cannot share this model", "--tensor-parallel-size"),
        pytest.param([MODEL, "--block-size", "7"], "block_size", "--block-size", marks=WHOLE),
        pytest.param([MODEL, "--max-model-len", "9999999"], "4096", "--max-model-len", marks=WHOLE),
        ([MODEL, "--dtype", "int3"], "dtype", "--dtype"),
        pytest.param(
            [MODEL, "--kv-cache-dtype", "int3"], "one of auto, fp8, fp8_e4m3, int8, int4", "--kv-cache-dtype", marks=WHOLE
        ),
        pytest.param([MODEL, "--kv-cache-memory-bytes", "1KiB"], "set it to at least", "--kv-cache-memory-bytes", marks=WHOLE),
        pytest.param([MODEL, "--kv-fs-path", "/kv"], "kv_fs_path: needs kv_fs_bytes", "--kv-fs-path", marks=WHOLE),
        pytest.param(
            [MODEL, "--kv-cpu-bytes", "1GiB", "--no-enable-prefix-caching"],
            "kv_cpu_bytes: needs enable_prefix",
            "--kv-cpu-bytes",
            marks=WHOLE,
        ),
        ([MODEL, "--api-key", ""], "empty", "--api-key"),
        pytest.param([MODEL, "--host", "none.invalid"], "host: cannot listen on none.invalid", "--host", marks=WHOLE),
        pytest.param([MODEL, "--log-level", "loud"], "log_level", "--log-level", marks=WHOLE),
        pytest.param([MODEL, "--drain-seconds", "-1"], "drain_seconds", "--drain-seconds", marks=WHOLE),
    ],
)
def test_a_failure_ends_with_cause_and_fix(arguments, cause, fix):
    answer = failing(*arguments, "--port", "0")
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    *_, cause_line, advice = answer.stderr.rstrip().splitlines()
    assert cause_line.startswith("error: ")
    assert cause in cause_line
    assert advice.startswith("fix: ")
    assert fix in advice


@pytest.mark.parametrize(
    ("architecture", "cause", "fix"),
    [
        ("Gemma3nForCausalLM", "the nearest is Gemma3ForCausalLM; supported: ", "docs/models.md"),
        pytest.param("BloomForCausalLM", "BloomForCausalLM: not supported; supported: ", "docs/models.md", marks=WHOLE),
    ],
)
def test_an_unknown_architecture_is_told_the_nearest_and_how_one_is_added(tmp_path, architecture, cause, fix):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    answer = failing(str(tmp_path), "--port", "0")
    assert answer.returncode == 1 and "Traceback" not in answer.stderr
    *_, cause_line, advice = answer.stderr.rstrip().splitlines()
    assert cause_line.startswith(f"error: config.json: architectures: {architecture}") and cause in cause_line
    assert "starling.models" in cause_line and fix in advice


def test_a_flag_that_only_vllm_has_is_answered_with_what_to_do():
    answer = failing("m", "--num-gpu-blocks-override=100")
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        "error: there is no --num-gpu-blocks-override here",
        "fix:   give --kv-cache-memory-bytes",
    ]


def test_a_port_in_use_is_reported_before_the_model_is_loaded():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        answer = failing(MODEL, "--port", port)
    assert answer.returncode == 1
    assert port in answer.stderr
    assert "--port" in answer.stderr
    assert "load" not in answer.stderr.replace("loaded", "")


def test_bad_values_of_flags_are_usage_errors():
    for flags, form in (
        (["--kv-cache-memory-bytes", "lots"], "4GiB"),
        (["--kv-cpu-bytes", "4XB"], "4GiB"),
        (["--kv-fs-bytes", "10 G B"], "4GiB"),
        (["--rate-limit", "fast"], "10/s"),
        (["--port", "x"], "integer"),
    ):
        answer = failing(MODEL, *flags)
        assert answer.returncode == 2
        assert "Traceback" not in answer.stderr
        assert flags[0] in answer.stderr and form in answer.stderr


def _catches(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process has a handler for a signal; see proc(5)."""
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_signal_while_loading_ends_it(tmp_path):
    command = [sys.executable, "-m", "starling_cli.main", "serve", MODEL, "--port", "0"]
    log = tmp_path / "log"
    with log.open("wb") as errors, subprocess.Popen(command, cwd=REPOSITORY, stderr=errors) as process:
        deadline = time.monotonic() + 60
        while b"looking for" not in log.read_bytes() or not _children(process.pid) or not _catches(process.pid, signal.SIGTERM):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = _children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "stopped before" in log.read_text()
    assert not any(Path(f"/proc/{child}").exists() for child in children), "the core ends too"


def test_chat_streams_an_answer(server):
    answer = starling("chat", "--url", server.url, "--max-tokens", "8", "What is a list?")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_a_conversation_remembers(server):
    answer = starling("chat", "--url", f"{server.url}/v1", "--max-tokens", "4", input="Hello\n\nAnd now?\n")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("\n") >= 2


def test_chat_without_a_server_says_what_to_do():
    answer = starling("chat", "--url", "http://127.0.0.1:9", "hello")
    assert answer.returncode == 1
    assert "starling serve" in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr


def test_chat_shows_the_servers_error(server):
    answer = starling("chat", "--url", server.url, "--model", "gpt-9", "hello")
    assert answer.returncode == 1
    assert "does not exist" in answer.stderr


def test_bench_serve_reports_and_writes(server, tmp_path):
    file = tmp_path / "result.json"
    flags = ["--num-prompts", "6", "--input-len", "12", "--output-len", "8", "--max-concurrency", "3", "--json", str(file)]
    answer = starling("bench", "serve", "--url", server.url, *flags, "--goodput", "ttft:60000", "tpot:60000")
    assert answer.returncode == 0, answer.stderr
    for word in ("TTFT", "ITL", "TPOT", "output tokens/s", "goodput"):
        assert word in answer.stdout
    result = json.loads(file.read_text())["result"]
    assert result["completed"] == 6
    assert result["output_tokens"] == 48
    assert result["goodput"] == pytest.approx(result["request_rate"])
    assert result["drafts"] is None and "draft tokens" not in answer.stdout


def test_bench_reads_what_the_server_counts_of_drafts(server):
    server.wait_until_idle()  # what was counted before has been reported
    before = counts_in(server.http.get("/metrics").text)
    body = {"messages": [{"role": "user", "content": "Hello"}], "model": "pydoc", "temperature": 0, "max_tokens": 30}
    text = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    predicted = {**body, "prediction": {"type": "content", "content": text}}
    details = server.http.post("/v1/chat/completions", json=predicted).json()["usage"]["completion_tokens_details"]
    server.wait_until_idle()
    found = accepted_between(before, counts_in(server.http.get("/metrics").text))
    assert found.accepted_tokens == details["accepted_prediction_tokens"] > 0
    assert found.accepted_tokens == round(sum(found.rate_by_position) * found.rows)


def test_bench_serve_of_a_chat_at_a_rate(server):
    flags = ["--num-prompts", "4", "--output-len", "4", "--request-rate", "50", "--chat"]
    answer = starling("bench", "serve", "--url", server.url, *flags)
    assert answer.returncode == 0, answer.stderr


def test_bench_offline(tmp_path):
    file = tmp_path / "result.json"
    small = ["--output-len", "4", "--input-len", "8", "--kv-cache-memory-bytes", "64MiB", "--json", str(file)]
    answer = starling("bench", "throughput", MODEL, "--num-prompts", "4", *small)
    assert answer.returncode == 0, answer.stderr
    result = json.loads(file.read_text())["result"]
    assert result["output_tokens"] == 16 and result["drafts"] is None
    flags = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0", *small, "--output-len", "60"]
    answer = starling("bench", "latency", MODEL, *flags, "--speculative-config", '{"method": "ngram"}')
    assert answer.returncode == 0, answer.stderr
    result = json.loads(file.read_text())["result"]
    assert result["latency"]["p99"] > 0
    assert 0 < result["drafts"]["accepted_tokens"] <= result["drafts"]["draft_tokens"]
    assert "draft tokens accepted" in answer.stdout


@pytest.mark.parametrize(("text", "rate"), [("10/s", (10, 1)), ("600/m", (600, 60)), ("5/30s", (5, 30)), ("9/2h", (9, 7200))])
def test_rates(text, rate):
    parsed = parse_rate(text)
    assert (parsed.requests, parsed.seconds) == rate


@pytest.mark.parametrize("text", ["", "10", "0/s", "10/d", "-1/s", "10/0s", "ten/s"])
def test_no_rates(text):
    with pytest.raises(ValueError, match="like 10/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("x", "max_model_len"),
        ConfigError("x"),
        ModelError("x"),
        UnsupportedModel("x"),
        ModelPackageError("x"),
        WeightError("x"),
        EngineDead("x"),
    ],
)
def test_every_failure_has_a_fix(error):
    assert len(fix_for(error)) > 10


def test_a_fix_names_the_command_and_what_it_takes():
    assert fix_for(ConfigError("x", "hold_seconds"), "router") == "change --hold-seconds (see starling router --help)"
    assert fix_for(ConfigError("x", "backends"), "router") == "change BACKENDS (see starling router --help)"


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
