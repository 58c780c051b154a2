"""Weights from a hub: downloaded once a machine, verified, and tried again after a failure."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starling_agent.contract.config import ModelSourceConfig
from starling_agent.node.failures import NodeFailure
from starling_agent.node.weights import commit_of, obtain

from tests.agent.node.conftest import MODEL, StartAgent, complete
from tests.agent.node.hub import COMMIT, Hub, running_hub

SMALL = {"config.json": b"{}", "model.safetensors": os.urandom(1 << 20), "tokenizer.json": b"{ }", "README.md": b"no"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A small repository."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name, content in SMALL.items():
        (folder / name).write_bytes(content)
    with running_hub(folder) as running:
        for name, value in environment(running).items():
            monkeypatch.setenv(name, value)
        yield running


def environment(hub: Hub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "NO_PROXY": "*"}


class ProgressLog:
    """Records the progress and retries of a download."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.retries: list[str] = []
        self.begun = asyncio.Event()

    def on_progress(self, phase: str, done: int, total: int) -> None:
        if done:
            self.begun.set()
        self.steps.append((phase, done, total))


async def download(cache: Path, log: ProgressLog, name: str = "org/name", stall: float = 30.0) -> Path:
    config = ModelSourceConfig(source=f"hf://{name}", cache_dir=str(cache), served_names=["m"], download_stall_seconds=stall)
    return await obtain(config, log.on_progress, log.retries.append)


async def test_a_repository_is_downloaded_and_verified(hub: Hub, tmp_path: Path):
    log = ProgressLog()
    folder = await download(tmp_path / "cache", log)
    assert folder.name == COMMIT and folder.is_relative_to(tmp_path / "cache")
    assert {path.name for path in folder.iterdir()} == set(SMALL) - {"README.md"}
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    total = sum(len(content) for name, content in SMALL.items() if name != "README.md")
    assert {step[0] for step in log.steps} == {"downloading", "verifying"}
    assert log.steps[-1] == ("verifying", total, total)
    assert log.retries == []
    assert "Bearer hf_secret" in hub.tokens


async def test_of_a_gguf_model_one_file_is_downloaded_and_verified(hub: Hub, tmp_path: Path):
    (hub.folder / "model-Q8_0.gguf").write_bytes(content := b"GGUF" * 1000)
    log = ProgressLog()
    path = await download(tmp_path / "cache", log, "org/name:model-Q8_0.gguf")
    assert path.read_bytes() == content and [each.name for each in path.parent.iterdir()] == [path.name]
    assert log.steps[-1] == ("verifying", len(content), len(content))
    source = ModelSourceConfig(source="hf://org/name:model-Q8_0.gguf", cache_dir="", served_names=["m"])
    assert commit_of(source, path) == COMMIT


async def test_a_verified_snapshot_is_neither_downloaded_nor_read_again(hub: Hub, tmp_path: Path):
    await download(tmp_path / "cache", ProgressLog())
    hub.downloads.clear()
    log = ProgressLog()
    await download(tmp_path / "cache", log, "org/name@v1")
    assert hub.downloads == []
    assert "verifying" not in {step[0] for step in log.steps}


async def test_a_file_that_changed_in_the_cache_is_downloaded_again(hub: Hub, tmp_path: Path):
    folder = await download(tmp_path / "cache", ProgressLog())
    (folder / "model.safetensors").write_bytes(b"half")
    log = ProgressLog()
    folder = await download(tmp_path / "cache", log)
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert len(log.retries) == 1 and hub.downloads.count("model.safetensors") == 2


async def test_two_agents_at_once_download_once(hub: Hub, tmp_path: Path):
    hub.delay = 0.05
    folders = await asyncio.gather(*(download(tmp_path / "cache", ProgressLog()) for _ in range(2)))
    assert folders[0] == folders[1]
    assert sorted(hub.downloads) == sorted(set(SMALL) - {"README.md"})


async def test_a_download_that_stalls_is_started_again(hub: Hub, tmp_path: Path):
    hub.silences = 1
    log = ProgressLog()
    folder = await download(tmp_path / "cache", log, stall=3.0)
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert len(log.retries) == 1 and "no byte for 3 s" in log.retries[0]


async def test_wrong_bytes_are_detected_and_downloaded_again(hub: Hub, tmp_path: Path):
    hub.corrupt = 1
    log = ProgressLog()
    folder = await download(tmp_path / "cache", log)
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert len(log.retries) == 1 and "model.safetensors" in log.retries[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/gated", "gated"),
        ("org/absent", "no such repository"),
        ("org/name@v9", "org/name"),
        ("org/name:no.gguf", "no such file"),
    ],
)
@pytest.mark.usefixtures("hub")
async def test_a_repository_that_the_hub_refuses_is_not_tried_again(tmp_path: Path, name: str, words: str):
    log = ProgressLog()
    with pytest.raises(NodeFailure, match=words) as raised:
        await download(tmp_path / "cache", log, name)
    assert raised.value.fatal and log.retries == []


@pytest.mark.usefixtures("hub")
async def test_a_cache_that_cannot_be_written_is_fatal(tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NodeFailure, match=r"model\.cache_dir: .*cannot be written") as raised:
        await download(tmp_path / "cache", ProgressLog())
    assert raised.value.fatal


async def test_a_cancelled_download_leaves_no_process(hub: Hub, tmp_path: Path):
    hub.silences = 1
    log = ProgressLog()
    task = asyncio.create_task(download(tmp_path / "cache", log))
    await log.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any("node.fetch" in command for command in child_commands())


def child_commands() -> list[str]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in children]


def test_two_agents_of_one_machine_serve_from_one_download(start_agent: StartAgent, tmp_path: Path):
    with running_hub(MODEL) as hub:
        hub.delay = 0.01
        model = {"source": "hf://org/name@main", "cache_dir": str(tmp_path / "shared")}
        first, second = (start_agent(model=model, pod=f"chat-1a2b3c4-{i}-0", environment=environment(hub)) for i in range(2))
        seen = {report.phase: report for report in first.reports(lambda report: report.ready) if report.progress is not None}
        second.reports(lambda report: report.ready)
        assert hub.downloads.count("model.safetensors") == 1
    progress = seen["downloading"].progress
    assert progress is not None and progress.unit == "bytes" and progress.total > 10_000_000
    assert complete(first).status_code == complete(second).status_code == 200
