"""Weights from a hub: verified, once a machine, watched, begun again."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starling_agent.contract.config import ModelSourceConfig
from starling_agent.node.failures import NodeFailure
from starling_agent.node.weights import obtain

from tests.agent.node.conftest import MODEL, StartAgent, ask
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


class Told:
    """What `obtain` tells."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.retries: list[str] = []
        self.begun = asyncio.Event()

    def tell(self, phase: str, done: int, total: int) -> None:
        if done:
            self.begun.set()
        self.steps.append((phase, done, total))


async def download(cache: Path, told: Told, name: str = "org/name", stall: float = 30.0) -> Path:
    config = ModelSourceConfig(source=f"hf://{name}", cache_dir=str(cache), served_names=["m"], download_stall_seconds=stall)
    return await obtain(config, told.tell, told.retries.append)


async def test_downloads_and_verifies(hub: Hub, tmp_path: Path):
    told = Told()
    folder = await download(tmp_path / "cache", told)
    assert folder.name == COMMIT and folder.is_relative_to(tmp_path / "cache")
    assert {path.name for path in folder.iterdir()} == set(SMALL) - {"README.md"}
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    total = sum(len(content) for name, content in SMALL.items() if name != "README.md")
    assert {step[0] for step in told.steps} == {"downloading", "verifying"}
    assert told.steps[-1] == ("verifying", total, total)
    assert told.retries == []
    assert "Bearer hf_secret" in hub.tokens


async def test_what_is_there_is_neither_fetched_nor_read_again(hub: Hub, tmp_path: Path):
    await download(tmp_path / "cache", Told())
    hub.downloads.clear()
    told = Told()
    await download(tmp_path / "cache", told, "org/name@v1")
    assert hub.downloads == []
    assert "verifying" not in {step[0] for step in told.steps}


async def test_a_file_that_changed_since_is_noticed(hub: Hub, tmp_path: Path):
    folder = await download(tmp_path / "cache", Told())
    (folder / "model.safetensors").write_bytes(b"half")
    told = Told()
    folder = await download(tmp_path / "cache", told)
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert len(told.retries) == 1 and hub.downloads.count("model.safetensors") == 2


async def test_two_at_once_download_once(hub: Hub, tmp_path: Path):
    hub.delay = 0.05
    folders = await asyncio.gather(*(download(tmp_path / "cache", Told()) for _ in range(2)))
    assert folders[0] == folders[1]
    assert sorted(hub.downloads) == sorted(set(SMALL) - {"README.md"})


async def test_a_download_that_stalls_is_begun_again(hub: Hub, tmp_path: Path):
    hub.silences = 1
    told = Told()
    folder = await download(tmp_path / "cache", told, stall=3.0)
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert len(told.retries) == 1 and "no byte for 3 s" in told.retries[0]


async def test_wrong_bytes_are_noticed_and_fetched_again(hub: Hub, tmp_path: Path):
    hub.corrupt = 1
    told = Told()
    folder = await download(tmp_path / "cache", told)
    assert (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert len(told.retries) == 1 and "model.safetensors" in told.retries[0]


@pytest.mark.parametrize(
    ("name", "words"), [("org/gated", "gated"), ("org/absent", "no such repository"), ("org/name@v9", "org/name")]
)
@pytest.mark.usefixtures("hub")
async def test_what_the_hub_refuses_is_final(tmp_path: Path, name: str, words: str):
    told = Told()
    with pytest.raises(NodeFailure, match=words) as raised:
        await download(tmp_path / "cache", told, name)
    assert raised.value.fatal and told.retries == []


@pytest.mark.usefixtures("hub")
async def test_a_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NodeFailure, match=r"model\.cache_dir: .*cannot be written") as raised:
        await download(tmp_path / "cache", Told())
    assert raised.value.fatal


async def test_a_cancelled_download_leaves_no_process(hub: Hub, tmp_path: Path):
    hub.silences = 1
    told = Told()
    task = asyncio.create_task(download(tmp_path / "cache", told))
    await told.begun.wait()
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
    assert ask(first).status_code == ask(second).status_code == 200
