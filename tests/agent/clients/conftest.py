"""A server of a random model for clients of others: fast with long prompts, and with a template that offers tools."""

import json
import shutil
from pathlib import Path

import pytest

from tests.agent.clients.documented import MODEL
from tests.agent.conftest import REPOSITORY, TOOLS_TEMPLATE, LiveServer, StartServer

END = 2
"""The token <|im_end|>, which the model's files do not name as its end."""


@pytest.fixture(scope="module")
def judged(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """The names beside the documented one make judges try what only models of those names have."""
    folder = tmp_path_factory.mktemp("model") / "random"
    shutil.copytree(REPOSITORY / "models/starling-random-moe", folder)
    _change(folder / "config.json", eos_token_id=END, max_position_embeddings=32768)
    _change(folder / "generation_config.json", eos_token_id=END)
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    names = [f"--served-model-name={name}" for name in (MODEL, "other", "gpt-5.5", "claude-4")]
    flags = ("--kv-cache-memory-bytes=512MiB", "--accept-seconds=0", "--reasoning-parser=qwen3")
    return start_server(*names, *flags, model=str(folder))


def _change(file: Path, **fields: int) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
