"""`/admin/scale` on the real admin application, with a fake Resizer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.group import GroupMember
from starling_agent.contract.scale import LoadedExperts, Operation
from starling_agent.file_token import FileToken
from starling_agent.group.leader import Leader
from starling_agent.group.operations import REMEMBERED, Operations
from starling_agent.group.size_controller import SizeController
from starling_agent.node.admin import SleepRoutes, create_admin
from starling_agent.node.drain_deadline import DrainDeadline
from starling_agent.node.pinned_commit import PinnedCommit
from starling_agent.report_state import ReportState
from starling_engine.elastic.coordinator import SizeChange
from starling_engine.errors import EpochFailed
from starling_engine.topology.epoch import ExpertLoads

from tests.operator.plan.building import make_report

ELASTIC = LayoutConfig.model_validate({"tensor": 2, "per_node": 4, "elastic": {"min": 2, "max": 8}})


class FakeResizer:
    """Waits for `go` before the commit, and then fails with `fault` if there is one."""

    def __init__(self) -> None:
        self.data = 2
        self.epoch = 1
        self.dead: str | None = None
        self.go = asyncio.Event()
        self.fault: EpochFailed | None = None
        self.undone = False

    async def resize(self, change: SizeChange) -> None:
        change.enter("waiting")
        change.enter("preparing")
        try:
            await self.go.wait()
            if self.fault is not None:
                raise self.fault
        except BaseException:
            self.undone = True
            raise
        change.loaded = {"peers": ExpertLoads(3, 6_000, 2.0), "checkpoint": ExpertLoads()}
        change.enter("committing")
        await asyncio.sleep(0.05)
        change.enter("releasing")
        self.data, self.epoch = change.target, self.epoch + 1


class AdminClient:
    """A client of the admin application, with the size controller and the report behind it."""

    def __init__(self, http: httpx.AsyncClient, controller: SizeController, state: ReportState) -> None:
        self.http, self.controller, self.state, self.resizer = http, controller, state, FakeResizer()
        controller.set_resizer(self.resizer)

    async def put(self, name: str, data: int) -> httpx.Response:
        return await self.http.put("/admin/scale", json={"operation": name, "data": data})

    async def get(self, name: str) -> Operation:
        return Operation.model_validate_json((await self.http.get("/admin/scale", params={"operation": name})).content)

    async def delete(self, name: str) -> httpx.Response:
        return await self.http.delete("/admin/scale", params={"operation": name})

    async def until(self, name: str, *phases: str) -> Operation:
        for _ in range(100):
            if (operation := await self.get(name)).phase in phases:
                return operation
            await asyncio.sleep(0.01)
        raise AssertionError(operation)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def client(state: ReportState, folder: Path, operations: Operations | None) -> httpx.AsyncClient:
    (folder / "token").write_text("sesame")
    app = create_admin(
        state, FileToken(folder / "token"), None, "10.0.0.1:8001", operations, SleepRoutes(), PinnedCommit(None), DrainDeadline()
    )
    headers = {"Authorization": "Bearer sesame"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin", headers=headers)


def make_leader() -> Leader:
    local = GroupMember(node=0, pod="a-0", address="", incarnation="life", group="a", revision="r", release="1", config_hash="")
    return Leader(local, nodes=4, data=0)


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminClient]:
    state = ReportState(make_report(), lambda: 0)
    controller = SizeController(make_leader(), ELASTIC, state.update)
    async with client(state, tmp_path, Operations(ELASTIC, controller, state.update)) as http:
        yield AdminClient(http, controller, state)


async def test_an_operation_goes_through_its_phases_and_is_found_by_its_id(admin: AdminClient) -> None:
    answer = await admin.put("a", 4)
    began = Operation.model_validate_json(answer.content)
    assert (answer.status_code, began.phase, began.source, began.target, began.nodes) == (202, "waiting", 2, 4, 2)
    assert (await admin.until("a", "preparing")).epoch == 0
    assert (await admin.put("a", 4)).json()["phase"] == "preparing", "the same operation, and not begun again"
    assert code(await admin.put("a", 6)) == (400, "invalid_target")
    admin.resizer.go.set()
    done = await admin.until("a", "done")
    assert (done.epoch, done.progress, admin.resizer.data) == (2, 1.0, 4)
    assert done.seconds["committing"] >= 0.05 and set(done.seconds) == {"waiting", "preparing", "committing", "releasing"}
    assert done.loaded == {"peers": LoadedExperts(experts=3, bytes=6_000, bytes_per_second=3_000)}
    assert admin.state.report.operation == done, "the operator reads it there"
    assert (await admin.put("a", 4)).json()["phase"] == "done"
    assert code(await admin.delete("a")) == (409, "too_late")


async def test_operations_run_one_at_a_time_and_are_cancelled_only_before_their_commit(admin: AdminClient) -> None:
    await admin.put("a", 4)
    await admin.until("a", "preparing")
    assert code(await admin.put("b", 6)) == (409, "operation_running")
    assert (await admin.delete("a")).status_code == 202
    assert (await admin.until("a", "cancelled")).error is None and admin.resizer.undone
    assert (await admin.delete("a")).json()["phase"] == "cancelled"
    admin.resizer.go.set()
    await admin.put("b", 6)
    await admin.until("b", "committing", "done")
    assert code(await admin.delete("b")) == (409, "too_late")
    assert (await admin.until("b", "done")).target == 6


async def test_an_operation_that_fails_reports_the_cause(admin: AdminClient) -> None:
    admin.resizer.fault = EpochFailed("rank 3 could not load")
    admin.resizer.go.set()
    await admin.put("a", 4)
    failed = await admin.until("a", "failed")
    assert (failed.error, failed.epoch, admin.resizer.data) == ("rank 3 could not load", 0, 2)


async def test_an_operation_waits_while_no_engine_runs(admin: AdminClient) -> None:
    admin.controller.set_resizer(None)
    admin.resizer.go.set()
    assert (await admin.put("first", 2)).json()["source"] == 0
    await asyncio.sleep(0)  # its task has had a turn
    assert (await admin.get("first")).phase == "waiting"
    admin.controller.set_resizer(admin.resizer)
    await admin.until("first", "done")


@pytest.mark.parametrize("data", [1, 3, 10])
async def test_a_size_that_the_group_cannot_have_is_refused_with_the_possible_ones(admin: AdminClient, data: int) -> None:
    answer = await admin.put("a", data)
    assert code(answer) == (400, "invalid_target")
    assert "possible are 2, 4, 6, 8" in answer.text and answer.json()["error"]["param"] == "data"
    assert admin.state.report.operation is None


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        ({"operation": "a", "data": 0}, "data", "invalid_target"),
        ({"operation": "a", "data": "many"}, "data", "invalid_target"),
        ({"operation": "", "data": 2}, "operation", "invalid_value"),
        ({"data": 2}, "operation", "invalid_value"),
        ([], None, "invalid_value"),
    ],
)
async def test_a_malformed_request_is_refused_and_its_field_named(
    admin: AdminClient, body: Any, field: str | None, reason: str
) -> None:
    answer = await admin.http.put("/admin/scale", json=body)
    assert code(answer) == (400, reason) and answer.json()["error"]["param"] == field


async def test_unknown_operations_lost_ranks_other_nodes_and_fixed_sizes_are_refused(admin: AdminClient, tmp_path: Path) -> None:
    assert code(await admin.http.get("/admin/scale", params={"operation": "nobody"})) == (404, "unknown_operation")
    assert code(await admin.delete("nobody")) == (404, "unknown_operation")
    assert code(await admin.http.get("/admin/scale")) == (400, "invalid_value")
    assert (await admin.http.put("/admin/scale", headers={"Authorization": "Bearer guess"}, json={})).status_code == 401
    admin.resizer.dead = "rank 1 on 10.0.0.2 is gone"
    answer = await admin.put("a", 4)
    assert code(answer) == (409, "rank_dead") and "10.0.0.2" in answer.text
    async with client(admin.state, tmp_path, None) as follower:
        answer = await follower.put("/admin/scale", json={"operation": "a", "data": 4})
        assert code(answer) == (409, "not_leader") and "10.0.0.1:8001" in answer.text
    fixed = Operations(LayoutConfig(data=2), admin.controller, admin.state.update)
    async with client(admin.state, tmp_path, fixed) as http:
        answer = await http.put("/admin/scale", json={"operation": "a", "data": 4})
        assert code(answer) == (400, "invalid_target") and "keeps its size of 2" in answer.text


async def test_old_operations_are_forgotten(admin: AdminClient) -> None:
    admin.resizer.go.set()
    for number in range(REMEMBERED + 1):
        await admin.put(f"{number}", 4)
        await admin.until(f"{number}", "done")
    assert code(await admin.delete("0")) == (404, "unknown_operation")
    assert (await admin.get("1")).phase == "done"
