"""Router processes in place of the routers' Deployment: one of them, and those that end while it takes over."""

import asyncio
import contextlib
import itertools
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.router import router_token
from starling_agent.contract.router_report import ServiceNotice
from starling_operator.plan.observed import Manifest

from starling_cli.local.launch import Launch
from starling_cli.local.machine_folders import MachineFolders
from starling_cli.local.pod import LocalPod, PodRunner
from starling_cli.local.ports import LOCALHOST, free_ports
from starling_cli.local.router_launch import router_launch
from starling_cli.local.volumes import Objects

PROBE_SECONDS = 0.1
NOTICE_SECONDS, NOTICE_AGAIN_SECONDS = 1.0, 20.0
"""Seconds between two notices to a router, at least and at most: it forgets one after a minute."""


@dataclass
class LocalRouter(LocalPod):
    """A router's pod; `revision` is its Deployment's version. `listening` is the process that was found to listen."""

    listening: int | None = None

    @property
    def is_ready(self) -> bool:
        return self.deleted_at is None and self.pid is not None and self.pid == self.listening


class LocalRouters:
    """Runs one router, however many the Deployment asks for. `changed` is called after every change of its state."""

    def __init__(
        self, folders: MachineFolders, objects: Callable[[], Objects], client: AgentClient, changed: Callable[[], None]
    ) -> None:
        self._folders, self._objects, self._client, self._changed = folders, objects, client, changed
        self._notice, self._token = ServiceNotice(), ""
        self._backends = folders.folder / "backends"
        """File in place of the headless Service of agents."""
        self._runners: dict[str, PodRunner[LocalRouter]] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._count = itertools.count(1)

    @property
    def pods(self) -> Sequence[LocalRouter]:
        return [runner.pod for runner in self._runners.values()]

    @property
    def ready(self) -> Sequence[LocalRouter]:
        return [router for router in self.pods if router.is_ready]

    def reconcile(self, deployment: Manifest | None, agents: Sequence[LocalPod]) -> None:
        """Tells routers the agents, and has one run as the Deployment says: its predecessor drains as soon as it is ready."""
        self._write_backends(agents)
        for name in [name for name, runner in self._runners.items() if runner.is_gone]:
            del self._runners[name]
            self._probes.pop(name).cancel()
        version = None if deployment is None else deployment["metadata"]["resourceVersion"]
        if deployment is not None and all(router.revision != version for router in self.pods):
            self._start(deployment)
        if version is None or any(router.revision == version for router in self.ready):
            for runner in self._runners.values():
                if runner.pod.revision != version:
                    runner.stop()

    def notify(self, notice: ServiceNotice, admin_token: str) -> None:
        """Has routers told the service's state: they answer by it while no group serves."""
        self._notice, self._token = notice, router_token(admin_token.encode()).decode()

    def end_all(self) -> None:
        """Ends all routers as Ctrl-C does: no server is to come, so what they hold has nothing to wait for."""
        for runner in self._runners.values():
            runner.stop(number=signal.SIGINT)

    def kill_all(self) -> None:
        for runner in self._runners.values():
            runner.kill()

    async def close(self) -> None:
        """Leaves nothing running."""
        self.kill_all()
        for probe in self._probes.values():
            probe.cancel()
        for runner in self._runners.values():
            await runner.wait()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)

    def _write_backends(self, agents: Sequence[LocalPod]) -> None:
        """Names all agents that run, ready or not: routers read the file again when it changes, and ask each for its state."""
        text = "".join(f"http://{LOCALHOST}:{agent.endpoint_port}\n" for agent in agents if agent.pid is not None)
        if self._backends.exists() and self._backends.read_text() == text:
            return
        new = self._backends.with_suffix(".new")
        new.write_text(text)
        new.replace(self._backends)

    def _start(self, deployment: Manifest) -> None:
        meta = deployment["metadata"]
        name = f"{meta['name']}-{next(self._count)}"
        folder, scratch, log = self._folders.of_pod(name)
        router = LocalRouter(
            name=name,
            group=meta["name"],
            group_uid=meta["uid"],
            revision=meta["resourceVersion"],
            number=0,
            folder=folder,
            scratch=scratch,
            log=log,
        )
        self._runners[name] = PodRunner(router, lambda: self._prepare(router, deployment), self._changed)
        self._probes[name] = asyncio.create_task(self._attend(router))

    def _prepare(self, router: LocalRouter, deployment: Manifest) -> Launch:
        """Prepares each start: the port may be taken by now. Raises LaunchError."""
        (router.endpoint_port,) = free_ports(1)
        return router_launch(deployment, self._objects(), router, self._backends)

    async def _attend(self, router: LocalRouter) -> None:
        """Notes once for each process that it listens, and tells it the state of the service; its end is known without a probe."""
        given, at = ServiceNotice(), -math.inf
        while True:
            pid = router.pid
            if pid not in (None, router.listening) and await _listens(router.endpoint_port) and router.pid == pid:
                router.listening, at = pid, -math.inf
                self._changed()
            notice, age = self._notice, time.monotonic() - at
            if router.is_ready and age >= (NOTICE_SECONDS if notice != given else NOTICE_AGAIN_SECONDS):
                at = time.monotonic()
                if await self._notify(router, notice):
                    given = notice
            await asyncio.sleep(PROBE_SECONDS)

    async def _notify(self, router: LocalRouter, notice: ServiceNotice) -> bool:
        address = f"{LOCALHOST}:{router.endpoint_port}"
        with contextlib.suppress(NoAnswer, AgentRefusal, BadAnswer):  # one that ends; the next notice comes soon
            await self._client.router_report(address, self._token, notice, wait=0.0, seconds=NOTICE_SECONDS)
            return True
        return False


async def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(LOCALHOST, port)
        writer.close()
        return True
    return False
