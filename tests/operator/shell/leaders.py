"""Groups of agents that change size as `contract.scale` says, over real HTTP and without an engine. A test can hold a phase."""

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from starling_agent.contract.report import GroupSize, Topology
from starling_agent.contract.scale import Operation, ScaleRequest

from tests.operator.shell.agents import Agent
from tests.operator.shell.cluster import Cluster, Manifest, Refused, tolerating_errors
from tests.operator.shell.kubelet import Kubelet

NEXT = {"waiting": "preparing", "preparing": "committing", "committing": "releasing", "releasing": "done"}


@dataclass
class Member(Agent):
    """One agent. As node 0 it has `received` calls and accepted `operations`, the newest last.

    refuse         (status, code, message) of every call; None: it accepts them
    lost_answers   number of next calls that are carried out, and their answers lost
    lost_calls     number of next calls that are lost
    """

    received: list[tuple[str, str, int | None]] = field(default_factory=list)
    operations: dict[str, Operation] = field(default_factory=dict)
    effective: int = 0
    refuse: tuple[int, str, str] | None = None
    lost_answers: int = 0
    lost_calls: int = 0

    @property
    def newest(self) -> Operation | None:
        return next(reversed(self.operations.values()), None)

    async def scale(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "invalid_token", "the admin token is wrong")
        if request.method == "PUT":
            scale_request = ScaleRequest.model_validate(await request.json())
            identifier, data = scale_request.operation, scale_request.data
        else:
            identifier, data = request.query["operation"], None
        self.received.append((request.method, identifier, data))
        if self.lost_calls:
            self.lost_calls -= 1
            return self._hang_up(request)
        if self.refuse is not None:
            return _error(*self.refuse)
        answer = self._put(identifier, data) if data is not None else self._cancel(identifier)
        self.publish()
        if self.lost_answers:
            self.lost_answers -= 1
            return self._hang_up(request)
        return answer

    def publish(self) -> None:
        size = GroupSize(allocated=self.effective, joined=self.effective, effective=self.effective)
        self.update(operation=self.newest, size=size)

    def restart(self) -> None:
        """Becomes a new process that knows nothing."""
        self.operations.clear()
        self.effective = 0
        self.report = self.report.model_copy(update={"incarnation": secrets.token_hex(4), "version": 0})
        self.publish()

    def advance(self, phase: str, **more: Any) -> None:
        newest = self.newest
        assert newest is not None
        seconds = {**newest.seconds, newest.phase: 0.25}
        self.operations[newest.id] = newest.model_copy(update={"phase": phase, "seconds": seconds, **more})
        self.publish()

    def _put(self, identifier: str, data: int) -> web.Response:
        newest = self.newest
        if identifier not in self.operations:
            if newest is not None and not newest.ended:
                return _error(409, "operation_running", f"operation {newest.id} runs")
            made = Operation(id=identifier, source=self.effective, target=data, phase="waiting", nodes=data)
            self.operations[identifier] = made
        return web.json_response(self.operations[identifier].model_dump(), status=202)

    def _cancel(self, identifier: str) -> web.Response:
        found = self.operations.get(identifier)
        if found is None:
            return _error(404, "unknown_operation", f"there is no operation {identifier}")
        if found.phase not in ("waiting", "preparing"):
            return _error(409, "too_late", f"operation {identifier} is {found.phase}")
        self.advance("cancelled")
        return web.json_response(self.operations[identifier].model_dump(), status=202)

    def _hang_up(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


class Groups:
    """All agents of a test. `held_phase`: operations stay in it; `failures`: number of operations that fail when they prepare."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._missing: dict[str, Member] = {}
        self.held_phase = ""
        self.failures = 0

    def admit(self, pod: Manifest, agent: Agent) -> Agent:
        """Makes the pod's agent, which does not serve before it is in an epoch."""
        report = agent.report.model_copy(update={"phase": "warming", "ready": False, "topology": None, "epoch": 0})
        made = Member(report.model_copy(update={"leader": report.node == 0}), agent.token)
        self.members[pod["metadata"]["name"]] = made
        return made

    def leader(self, group: str) -> Member:
        return self.members[f"{group}-0"]

    async def run(self, cluster: Cluster, kubelet: Kubelet) -> None:
        """Runs until it is cancelled."""
        while True:
            with tolerating_errors("the groups"):
                await self._turn(cluster, kubelet)
            await asyncio.sleep(0.05)

    async def _turn(self, cluster: Cluster, kubelet: Kubelet) -> None:
        """Moves operations and members on. Members may come and go at each await."""
        pods = {pod["metadata"]["name"]: pod for pod in await cluster.pods() if "deletionTimestamp" not in pod["metadata"]}
        self._forget(pods)
        for name, member in list(self.members.items()):
            if name in pods and name.endswith("-0"):
                self._proceed(name.removesuffix("-0"), member)
        for name, member in list(self.members.items()):
            if name in pods and self.members.get(name) is member:
                await self._settle(kubelet, pods[name], name, member)

    def _forget(self, pods: dict[str, Manifest]) -> None:
        """Forgets members that are missing for the second time: one that came after the list was made is missing once."""
        missing = {name: member for name, member in self.members.items() if name not in pods}
        for name, member in missing.items():
            if self._missing.get(name) is member:
                del self.members[name]
        self._missing = missing

    def _proceed(self, group: str, leader: Member) -> None:
        operation = leader.newest
        if operation is None or operation.ended or operation.phase == self.held_phase:
            return
        if any(f"{group}-{number}" not in self.members for number in range(operation.target)):
            return
        if operation.phase == "preparing" and self.failures:
            self.failures -= 1
            leader.advance("failed", error="no memory for the experts")
        else:
            if operation.phase == "committing":
                leader.effective = operation.target
            leader.advance(NEXT[operation.phase])

    async def _settle(self, kubelet: Kubelet, pod: Manifest, name: str, member: Member) -> None:
        """Lets the member serve if it is in its leader's epoch, and only then."""
        group, _, number = name.rpartition("-")
        leader = self.members.get(f"{group}-0")
        effective = leader.effective if leader is not None else 0
        serves = int(number) < effective
        topology = Topology(tensor=1, pipeline=1, data=effective, expert=effective, ranks=effective) if serves else None
        if (member.report.ready, member.report.topology) != (serves, topology):
            member.update(phase="serving" if serves else "warming", ready=serves, topology=topology)
        if _is_ready(pod) != serves:
            # A pod that ends meanwhile has no address; a refused status is sent again in the next turn.
            with suppress(KeyError, Refused):
                await kubelet.set_status(pod, ready=serves)


def _is_ready(pod: Manifest) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def _error(status: int, code: str, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return web.json_response(body, status=status)
