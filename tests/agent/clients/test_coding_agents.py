"""Coding agents, set up as docs/clients.md says, change a file by calls that the model is forced to write."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starling_agent.openai.codex_models import INSTRUCTIONS

from tests.agent.clients.documented import example, exported
from tests.agent.clients.environment import OFFLINE, program
from tests.agent.clients.forced import Body, calling, offered, saying
from tests.agent.clients.forcing_proxy import ForcingProxy, forcing_proxy

TASK = "Change the greeting to goodbye."
DONE = "I changed the greeting."


@pytest.fixture(scope="session")
def codex() -> str:
    return program("agents", "codex")


@pytest.fixture(scope="session")
def claude() -> str:
    return program("agents", "claude")


@pytest.fixture(scope="session")
def opencode() -> str:
    return program("agents", "opencode")


@pytest.fixture(scope="session")
def aider() -> str:
    return program("aider", "aider")


@pytest.fixture
def file(tmp_path) -> Path:
    """The file to change, alone in its folder."""
    file = tmp_path / "project" / "greet.py"
    file.parent.mkdir()
    file.write_text('print("hello")\n')
    return file


def ran(command: list[str], file: Path, **environment: str) -> str:
    """Runs an agent in the file's folder with a home of its own. Returns what it printed."""
    home = file.parents[1] / "home"
    home.mkdir(exist_ok=True)
    own = OFFLINE | {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
    ended = subprocess.run(
        command, cwd=file.parent, env=own | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def ran_codex(codex: str, file: Path, proxy: ForcingProxy, *flags: str, asks: bool = True) -> str:
    """Runs Codex as documented, without its sandbox, which a container may not have. With `asks` it gets a list of models."""
    home = file.parents[1] / "codex"
    home.mkdir()
    config = example("Codex", "toml", proxy.url)
    if not asks:
        config = config.partition("\n[model_providers.starling.auth]")[0] + 'env_key = "STARLING_API_KEY"\n'
    (home / "config.toml").write_text(config)
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    command = [codex, "exec", *free, *flags, TASK]
    return ran(command, file, CODEX_HOME=str(home), STARLING_API_KEY="none")


def in_turns(*turns: Callable[[Body], Body]) -> Callable[[Body], Body]:
    """Returns what changes requests that offer tools by the next turn, and has others answered with a title."""
    left = list(turns)
    return lambda body: left.pop(0)(body) if offered(body) else saying(body, "A greeting")


def calls(**call: Any) -> Callable[[Body], Body]:
    """Returns the turn in which the model calls a tool."""
    return lambda body: calling(body, **call)


def says_that_it_is_done(body: Body) -> Body:
    return saying(body, DONE)


def check(file: Path, proxy: ForcingProxy, path: str, requests: int) -> None:
    assert file.read_text() == 'print("goodbye")\n'
    assert [request.status for request in proxy.requests(path)] == [200] * requests


def test_codex_changes_a_file(codex, judged, file):
    runs_sed = calls(exec_command={"cmd": "sed -i s/hello/goodbye/ greet.py"})
    with forcing_proxy(judged.url, in_turns(runs_sed, says_that_it_is_done)) as proxy:
        printed = ran_codex(codex, file, proxy)
    assert DONE in printed
    check(file, proxy, "/v1/responses", 2)


def test_codex_takes_what_the_server_says_of_the_model(codex, judged, file):
    """Without it Codex warns, and takes the name of a model of OpenAI's for that model."""
    with forcing_proxy(judged.url, in_turns(says_that_it_is_done)) as proxy:
        ran_codex(codex, file, proxy, "--model", "gpt-5.5", "-c", "model_reasoning_effort=none")
    told = json.loads((file.parents[1] / "codex/models_cache.json").read_text())
    assert [model["context_window"] for model in told["models"]] == [32768] * 4
    (request,) = proxy.requests("/v1/responses")
    assert (request.body["reasoning"], request.body.get("text")) == ({"effort": "none"}, None)
    assert INSTRUCTIONS in json.dumps(request.body)
    assert "apply_patch" not in offered(request.body)


def test_codex_patches_a_file_with_its_own_tool(codex, judged, file):
    """Codex offers it to models of some names of OpenAI's, to which it also sends a verbosity."""
    patch = '*** Begin Patch\n*** Update File: greet.py\n@@\n-print("hello")\n+print("goodbye")\n*** End Patch\n'
    with forcing_proxy(judged.url, in_turns(calls(apply_patch={"input": patch}), says_that_it_is_done)) as proxy:
        ran_codex(codex, file, proxy, "--model", "gpt-5.5", asks=False)
    sent = proxy.requests("/v1/responses")[0].body
    assert sent["text"] == {"verbosity": "low"}
    check(file, proxy, "/v1/responses", 2)
    (tool,) = (tool for tool in sent["tools"] if tool["type"] == "custom")
    body = {"model": sent["model"], "input": TASK, "tools": [tool], "tool_choice": {"type": "custom", "name": tool["name"]}}
    answer = judged.http.post("/v1/responses", json={**body, "max_output_tokens": 100})
    assert tool["format"]["syntax"] == "lark" and answer.status_code == 200, answer.text
    assert answer.json()["output"][-1]["input"].startswith("*** Begin Patch\n*** ")


def test_claude_code_changes_a_file(claude, judged, file):
    reads = calls(Read={"file_path": str(file)})
    edits = calls(Edit={"file_path": str(file), "old_string": "hello", "new_string": "goodbye"})
    with forcing_proxy(judged.url, in_turns(reads, edits, says_that_it_is_done)) as proxy:
        command = [claude, "-p", TASK, "--permission-mode", "acceptEdits"]
        printed = ran(command, file, **exported("Claude Code", proxy.url))
    assert DONE in printed
    check(file, proxy, "/v1/messages", 3)


@pytest.mark.whole
def test_opencode_changes_a_file(opencode, judged, file):
    reads = calls(read={"filePath": str(file)})
    edits = calls(edit={"filePath": str(file), "oldString": "hello", "newString": "goodbye"})
    with forcing_proxy(judged.url, in_turns(reads, edits, says_that_it_is_done)) as proxy:
        (file.parent / "opencode.json").write_text(example("OpenCode", "json", proxy.url))
        printed = ran([opencode, "run", TASK], file)
    assert DONE in printed
    check(file, proxy, "/v1/chat/completions", 4)  # one of them for the title


@pytest.mark.whole
def test_aider_changes_a_file(aider, judged, file):
    def writes(body: Body) -> Body:
        return saying(body, 'Here it is:\n\ngreet.py\n```\nprint("goodbye")\n```\n')

    with forcing_proxy(judged.url, writes) as proxy:
        command = [
            aider,
            "--no-show-release-notes",
            "--no-show-model-warnings",
            "--yes-always",
            "--no-git",
            "--edit-format",
            "whole",
            "--message",
            TASK,
            file.name,
        ]
        ran(command, file, **exported("Aider", proxy.url))
    check(file, proxy, "/v1/chat/completions", 1)
