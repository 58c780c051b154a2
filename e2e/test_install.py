"""The distribution as a user gets it: built, installed into an empty environment away from the checkout, and used."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "starling-pydoc"
MOST_TOKENS = 1000
"""More tokens than an `Answer` has, with all white space that JSON may have."""


class Answer(BaseModel):
    """The form that a chat is asked for; a number without a bound might have more digits than the answer has tokens."""

    is_function: bool
    arguments: int = Field(ge=0, le=99)


SCRIPT = """
from starling_engine import LLM, SamplingParams

with LLM({model!r}, kv_cache_memory_bytes=64 << 20, max_num_seqs=4) as llm:
    outputs = llm.generate(["The os module"] * 2, SamplingParams(temperature=0, max_tokens=8))
print(outputs[0].outputs[0].text == outputs[1].outputs[0].text, len(outputs[0].outputs[0].token_ids))
"""


def uv() -> list[str]:
    found = shutil.which("uv")
    return [found] if found else [sys.executable, "-m", "uv"]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the built wheel with the extra `agent`, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("install")
    run(*uv(), "build", "--wheel", "--quiet", "--out-dir", str(folder), cwd=ROOT)
    (wheel,) = folder.glob("starling-*.whl")
    run(*uv(), "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    run(*uv(), "pip", "install", "--quiet", "--python", str(python), "-c", str(ROOT / "constraints.txt"), f"{wheel}[agent]")
    return python.parent


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, env=clean_environment())
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="session")
def server(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(installed / "starling"), "serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port)]
    options = ["--served-model-name", "own", "--api-key", "secret", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "8"]
    process = subprocess.Popen([*command, *options], cwd=tmp_path_factory.mktemp("elsewhere"), env=clean_environment())
    url = f"http://127.0.0.1:{port}"
    wait_until_ready(process, f"{url}/ready")
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, "a drained server ends with status 0"


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    pytest.fail("the server did not become ready")


@pytest.mark.timeout(900)
def test_the_wheel_installs_and_answers_for_help(installed: Path) -> None:
    assert "serve" in run(str(installed / "starling"), "--help")


@pytest.fixture
def client(server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server}/v1", api_key="secret") as made:
        yield made


@pytest.mark.timeout(600)
def test_a_chat_streams(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="own",
        messages=[{"role": "user", "content": "What does os.path.join do?"}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) > 10
    assert chunks[-1].usage is not None and 0 < chunks[-1].usage.completion_tokens <= 40


def test_an_answer_has_the_form_that_is_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="own",
        messages=[{"role": "user", "content": "What does os.path.join do?"}],
        max_tokens=MOST_TOKENS,
        response_format=Answer,
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_metrics_count(server: str) -> None:
    """The chat has ended; the numbers of the engine's cores come a little later."""
    for _ in range(300):
        with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        if 'vllm:num_requests_running{model_name="own"} 0.0' in text:
            return
        time.sleep(0.1)
    pytest.fail(text)


def test_a_wrong_key_is_refused(server: str) -> None:
    request = urllib.request.Request(f"{server}/v1/models", headers={"Authorization": "Bearer wrong"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    with refused.value as answer:
        assert answer.code == 401 and json.load(answer)["error"]["code"] == "invalid_api_key"


@pytest.mark.timeout(600)
def test_a_script_runs(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=str(MODEL)))
    assert run(str(installed / "python"), str(script)).strip().endswith("True 8")
