"""`starling serve` before a mock core, in processes of their own, and the model that it serves: a tokenizer and a chat template.

    python bench/mock_served.py MODEL ADDRESS PARSERS

serves so, with formats of calls and reasoning or none, and writes its port.
"""

import asyncio
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mock_core
import tokenizers
import uvloop
from processes import cpu_seconds
from starling_agent import serve
from starling_agent.logs import configure_logs
from starling_agent.openai.endpoint import Endpoint
from starling_agent.settings import ServerSettings
from starling_engine import AsyncEngine, EngineArgs
from starling_engine.core.messages import Loading

PYDOC = Path(__file__).parents[1] / "models" / "starling-pydoc"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of Qwen3's tokenizer, which are not special there either."""
END = "<|im_end|>"
NAME = "m"
"""The served model's name."""
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
READY_SECONDS = 60.0


def write_model(folder: Path) -> tokenizers.Tokenizer:
    """Writes the repository's own model without weights, with Qwen3's markers as tokens. Returns its tokenizer."""
    shutil.copytree(PYDOC, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken(marker, normalized=False) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size() + 60}))
    return tokenizer


class Served:
    """A server and its mock core. `parsers` as `serve_mocked` has it."""

    def __init__(self, model: Path, output: list[int], parsers: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="starling-")
        address = f"ipc://{self._folder.name}/core"
        spawning = multiprocessing.get_context("spawn")
        self.control, theirs = spawning.Pipe()
        self._core = spawning.Process(target=mock_core.run, args=(address, output, theirs), daemon=True)
        self._core.start()
        self.control.recv()
        command = [sys.executable, __file__, str(model), address, parsers]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self.port = int(self._server.stdout.readline() or sys.exit("the server did not start"))

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the server's process up to now, without the one that renders chats."""
        return cpu_seconds(self._server.pid)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(30)
        self._core.terminate()
        self._core.join()
        self._folder.cleanup()


class PortDisplay:
    def phase(self, _: Loading) -> None:
        pass

    def serving(self, _: Endpoint, port: int) -> None:
        print(port, flush=True)


def serve_mocked(model: str, address: str, parsers: str) -> None:
    """Serves as `starling serve` does, only that its engine has a core already.

    The device says that the core takes no time of these CPUs. `parsers`: auto, or none, with which all of an output is content.
    """

    async def attach(*_: object) -> AsyncEngine:
        return await AsyncEngine.attach(EngineArgs(model=model, device="cuda", max_num_seqs=2048), [address])

    serve._start_engine = attach
    configure_logs("warning")
    settings = ServerSettings(
        port=0,
        tool_call_parser=parsers,
        reasoning_parser="none" if parsers == "none" else "qwen3",
        accept_seconds=0,
        drain_seconds=0,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve.serve(EngineArgs(model=NAME), settings, PortDisplay()))


if __name__ == "__main__":
    serve_mocked(*sys.argv[1:])
