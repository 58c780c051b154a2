"""Membership of nodes in their group: the leader's list, the nodes' polls, and the connections that follow. No sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starling_agent.contract.config import AgentConfig, LayoutConfig
from starling_agent.contract.group import GroupCore, GroupMember, GroupView
from starling_agent.contract.identity import read_identity
from starling_agent.group.connections import remote_cores
from starling_agent.group.leader import SILENCE_SECONDS, GroupRefusal, Leader, Unreachable
from starling_agent.group.local_share import LocalShare
from starling_agent.group.membership import GroupMembership
from starling_agent.group.node_layout import NodeLayout
from starling_agent.group.workers import GroupWorkers

from tests.agent.node.conftest import configuration


def member(node: int, **changes: Any) -> GroupMember:
    given: dict[str, Any] = {
        "node": node,
        "pod": f"chat-0-{node}",
        "address": f"10.0.0.{node}",
        "incarnation": f"life-{node}",
        "group": "chat-0",
        "revision": "1a2b3c4",
        "release": "0.1.0",
        "config_hash": "c0ffee",
    }
    return GroupMember(**{**given, **changes})


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def core(rank: int, **changes: Any) -> GroupCore:
    return GroupCore(**{"rank": rank, "address": f"tcp://10.0.0.{rank}:4000", **changes})


async def test_nodes_see_each_other_join_and_a_silent_one_is_dropped() -> None:
    clock = Clock()
    leader = Leader(member(0), nodes=2, data=2, clock=clock)
    first = await leader.answer(member(0), 0, 0)
    assert [known.node for known in first.members] == [0] and first.data == 2
    waiting = asyncio.create_task(leader.answer(member(0), first.version, 5))
    await asyncio.sleep(0)
    second = await leader.answer(member(1, cores=[core(1)]), 0, 0)
    assert (await waiting) == second and [known.node for known in second.members] == [0, 1]
    assert await leader.answer(member(1, cores=[core(1)]), second.version, 0.01) == second, (
        "an unchanged report makes no new version"
    )
    again = await leader.answer(member(1, incarnation="another life"), second.version, 5)
    assert again.version > second.version and again.members[1].cores == []
    clock.now += SILENCE_SECONDS - 1
    await leader.answer(member(0), 0, 0)
    clock.now += 2
    leader.drop_silent()
    assert [known.node for known in leader.view.members] == [0]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"group": "other-0"}, "other_group"),
        ({"revision": "7654321"}, "other_revision"),
        ({"release": "0.2.0"}, "other_release"),
        ({"config_hash": "decaf"}, "other_configuration"),
        ({"node": 2}, "no_such_node"),
    ],
)
async def test_a_node_of_another_group_revision_release_or_configuration_is_refused(changes: dict[str, Any], code: str) -> None:
    leader = Leader(member(0), nodes=2, data=2)
    with pytest.raises(GroupRefusal) as refused:
        await leader.answer(member(**{"node": 1, "pod": "chat-0-1", **changes}), 0, 0)
    assert refused.value.code == code and "chat-0-1" in str(refused.value)
    assert leader.view.members == []


class ScriptedLeader:
    """A MembershipService that gives a test's answers one after the other, and records all polls."""

    def __init__(self, *answers: GroupView | Exception) -> None:
        self.answers = list(answers)
        self.polls: list[tuple[GroupMember, GroupView | None]] = []

    async def poll(self, member: GroupMember, known: GroupView | None, seconds: float) -> GroupView:
        self.polls.append((member, known))
        if not self.answers:
            await asyncio.sleep(seconds)
        answer = self.answers.pop(0) if self.answers else known
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    async def until_polled(self, member: GroupMember, known: GroupView) -> None:
        for _ in range(1000):
            if self.polls[-1] == (member, known):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.polls)


async def test_a_node_polls_until_it_is_in_and_reports_its_changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling_agent.group.membership.RETRY_SECONDS", 0.01)
    view = GroupView(incarnation="life-0", version=3, data=2, target=2)
    service = ScriptedLeader(Unreachable("nobody there"), GroupRefusal("other_release", "too old"), view)
    statuses: list[str | None] = []
    membership = GroupMembership(service, member(1), statuses.append)
    running = asyncio.create_task(membership.run())
    await membership.changed(2)
    assert membership.view == view
    assert statuses == ["nobody there", "the leader refuses this node: too old", None]
    membership.publish([core(1)])
    await service.until_polled(member(1, cores=[core(1)]), view)
    membership.drain()
    await service.until_polled(member(1, cores=[core(1)], draining=True), view)
    membership.stop_accepting()
    await service.until_polled(member(1, cores=[core(1, taking=False)], draining=True), view)
    running.cancel()


async def test_a_node_that_ends_stays_while_the_leader_still_lists_its_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("starling_agent.group.membership.RETRY_SECONDS", 0.1)
    monkeypatch.setattr("starling_agent.group.local_share.PROPAGATION_SECONDS", 0.0)
    view = GroupView(incarnation="life-0", version=3, data=2, target=2, members=[member(1, cores=[core(1)])])
    left = view.model_copy(update={"version": 4, "members": [member(1, cores=[core(1, taking=False)])]})
    service = ScriptedLeader(view)
    membership = GroupMembership(service, member(1), lambda _: None)
    membership.publish([core(1)])
    running = asyncio.create_task(membership.run())
    await membership.changed(20)
    service.answers += [Unreachable("it starts again")] * 5 + [left]
    membership.stop_accepting()
    config = AgentConfig.model_validate(configuration(tmp_path, layout={"data": 2, "per_node": 1}))
    local_share = LocalShare(config, read_identity({"STARLING_POD_NAME": "chat-0-1"}), membership)
    await asyncio.wait_for(local_share.finish_for_others(None), 20)
    assert membership.view == left
    running.cancel()


async def test_a_node_that_ends_keeps_its_workers_and_joins_no_other_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another leader would lose that worker in the middle of streams."""
    started: list[str] = []

    class CountingMembership(GroupMembership):
        checks = 0

        @property
        def is_draining(self) -> bool:
            self.checks += 1
            return super().is_draining

    class Worker:
        pid, alive = 1, True

        def __init__(self, address: str, *_: object) -> None:
            started.append(address)
            self.address = address

        def close(self) -> None:
            started.append(f"closed {self.address}")

    monkeypatch.setattr("starling_agent.group.workers.WorkerHandle", Worker)
    monkeypatch.setattr("starling_agent.group.workers.CHECK_SECONDS", 0.0)
    old, new = (
        GroupView(incarnation=life, version=1, data=1, target=1, members=[member(0, cores=[GroupCore(rank=0, joining=life)])])
        for life in ("tcp://old:1", "tcp://new:1")
    )
    service = ScriptedLeader(old)
    membership = CountingMembership(service, member(1), lambda _: None)
    workers = GroupWorkers(NodeLayout(LayoutConfig(pipeline=2).at(1)), membership, "10.0.0.1")
    running = [asyncio.create_task(membership.run()), asyncio.create_task(workers.run())]
    async with asyncio.timeout(20):
        while not workers.alive:  # noqa: ASYNC110 - it is checked on a clock
            await asyncio.sleep(0.01)
        service.answers.append(new)
        membership.drain()
        while membership.view != new:
            await membership.changed(1)
        checks = membership.checks
        while membership.checks < checks + 10:  # noqa: ASYNC110 - it is checked on a clock
            await asyncio.sleep(0)
    assert started == ["tcp://old:1"]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def test_a_frontend_connects_to_the_cores_of_other_nodes_that_take_requests() -> None:
    members = [
        member(0, cores=[core(0)]),
        member(1, cores=[core(1), core(2, taking=False)]),
        member(2, cores=[GroupCore(rank=3, joining="tcp://x:1")]),
    ]
    view = GroupView(incarnation="life-0", version=1, data=3, target=3, members=members)
    assert remote_cores(view, 0) == {"engine core 1 of chat-0-1 (tcp://10.0.0.1:4000)": "tcp://10.0.0.1:4000"}
    assert list(remote_cores(view, 2).values()) == ["tcp://10.0.0.0:4000", "tcp://10.0.0.1:4000"]
    assert remote_cores(view.model_copy(update={"data": 1}), 0) == {}, "one that joins is masked until the commit"


def test_a_node_finds_its_leader_by_the_name_of_its_pod() -> None:
    pod = {"STARLING_POD_NAME": "chat-0-1", "STARLING_NAMESPACE": "prod"}
    assert read_identity(pod).leader == "chat-0-0.chat-0.prod.svc:8001"
    assert read_identity({**pod, "STARLING_LEADER": "127.0.0.1:9"}).leader == "127.0.0.1:9"
