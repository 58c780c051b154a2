"""All pods of a revision load one commit, although the branch moves between their starts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starling_agent.contract.config import ModelSourceConfig
from starling_agent.file_token import FileToken
from starling_agent.node.admin import SleepRoutes, create_admin
from starling_agent.node.drain_deadline import DrainDeadline
from starling_agent.node.failures import NodeFailure
from starling_agent.node.pinned_commit import PinnedCommit, pinned
from starling_agent.node.weights import weights_digest
from starling_agent.report_state import ReportState

from tests.agent.node.hub import COMMIT, Hub, running_hub
from tests.operator.plan.building import make_report

OTHER = "f" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "repository").mkdir()
    with running_hub(tmp_path / "repository") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("NO_PROXY", "*")
        yield running


class LoadingAgent:
    """An agent until it knows its commit. Each has a cache of its own, as on different cluster nodes."""

    def __init__(self, folder: Path, source: str = "hf://org/name", file: Path | None = None) -> None:
        self.model = ModelSourceConfig(source=source, cache_dir=str(folder), served_names=["m"])
        self.state = ReportState(make_report(phase="starting"), lambda: 0)
        self.pin = PinnedCommit(file)

    async def source(self) -> str:
        return (await pinned(self.model, self.pin, self.state)).source

    async def commit(self) -> str:
        """Returns the commit that the name means to it."""
        report = self.state.report
        while report.commit is None:
            report = await self.state.wait(report.version, report.incarnation, 30.0)
        return report.commit


async def test_agents_load_the_pinned_commit_though_the_branch_moves_between_them(hub: Hub, tmp_path: Path):
    hub.moves = True
    first, second = (LoadingAgent(tmp_path / name, file=tmp_path / "absent") for name in "ab")
    loads = [asyncio.create_task(agent.source()) for agent in (first, second)]
    resolved = {await first.commit(), await second.commit()}
    assert COMMIT in resolved and len(resolved) == 2, "the branch moved meanwhile"
    assert not any(load.done() for load in loads), "no agent loads before the commit is chosen"
    for agent in (first, second):
        agent.pin.choose(COMMIT)
    assert {await load for load in loads} == {f"hf://org/name@{COMMIT}"}
    assert {agent.state.report.commit for agent in (first, second)} == {COMMIT}


async def test_a_mounted_pin_is_used_without_the_hub_or_the_operator(tmp_path: Path):
    (tmp_path / "commit").write_text(COMMIT + "\n")
    agent = LoadingAgent(tmp_path, source="hf://org/name@v1", file=tmp_path / "commit")
    assert await agent.source() == f"hf://org/name@{COMMIT}"


@pytest.mark.parametrize("source", [f"hf://org/name@{COMMIT}", "file:///models/chat"])
async def test_a_source_that_cannot_move_needs_no_pin(source: str, tmp_path: Path):
    assert await LoadingAgent(tmp_path, source=source, file=tmp_path / "absent").source() == source


@pytest.mark.usefixtures("hub")
async def test_without_the_hub_a_name_means_the_commit_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for _ in range(2):
        agent = LoadingAgent(tmp_path, file=tmp_path / "absent")
        load = asyncio.create_task(agent.source())
        assert await agent.commit() == COMMIT
        load.cancel()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("hub")
async def test_a_repository_that_is_refused_fails_at_once(tmp_path: Path):
    with pytest.raises(NodeFailure, match="gated: accept its terms") as caught:
        await LoadingAgent(tmp_path, source="hf://org/gated", file=tmp_path / "absent").source()
    assert caught.value.fatal


async def test_the_operator_sends_the_commit_with_its_poll_and_the_first_one_stays(tmp_path: Path):
    (tmp_path / "token").write_text("secret")
    pin = PinnedCommit(tmp_path / "absent")
    state = ReportState(make_report(), lambda: 0)
    app = create_admin(state, FileToken(tmp_path / "token"), None, "", None, SleepRoutes(), pin, DrainDeadline())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
        for given, token, known in (
            (COMMIT, "wrong", None),
            ("main", "secret", None),
            (COMMIT, "secret", COMMIT),
            (OTHER, "secret", COMMIT),
        ):
            await client.get("/admin/report", params={"commit": given}, headers={"Authorization": f"Bearer {token}"})
            assert pin.known == known


def test_a_digest_depends_on_the_checkpoint_and_not_on_its_folder(tmp_path: Path):
    header = (2).to_bytes(8, "little") + b"{}"
    contents = [
        {"config.json": b"{}", "model.safetensors": header + b"1234"},
        {"config.json": b"{}", "model.safetensors": header + b"1234", "README.md": b"not loaded"},
        {"config.json": b"{ }", "model.safetensors": header + b"1234"},
        {"config.json": b"{}", "model.safetensors": header + b"12345"},
        {"config.json": b"{}", "model.safetensors": (2).to_bytes(8, "little") + b"[]1234"},
        {"config.json": b"{}", "model-1.safetensors": header + b"1234"},
    ]
    digests = []
    for number, files in enumerate(contents):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        digests.append(weights_digest(folder))
    assert digests[0] == digests[1] and len(set(digests)) == 5
    quantized = [weights_digest(tmp_path / "0", name) for name in (None, "int8", "int4")]
    assert quantized[0] == digests[0] and len(set(quantized)) == 3
