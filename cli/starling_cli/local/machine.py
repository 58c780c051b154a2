"""This machine as a cluster: carries out what the plan decides, and keeps the processes that the StatefulSets want."""

import asyncio
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from starling_operator.plan.decision import Decision, Delete
from starling_operator.plan.observed import Observed, Service, Settings

from starling_cli.local.front import LocalProxy
from starling_cli.local.launch import Launch, PodPlacement, launch
from starling_cli.local.leaders import LocalLeaders
from starling_cli.local.observe import observe
from starling_cli.local.pod import LocalPod, PodRunner
from starling_cli.local.ports import LOCALHOST, free_ports
from starling_cli.local.reports import follow_reports, report_client
from starling_cli.local.sources import PathMap
from starling_cli.local.store import Store
from starling_cli.local.volumes import LaunchError, Object, Objects, bring_late
from starling_cli.local.workload import MissingPod, missing_pods, surplus_pods

SETTINGS = Settings(agent_image="this installation of starling")


@dataclass(frozen=True)
class MachineFolders:
    """What a machine stands on: its private folder, where logs and downloads go, and what paths mean here."""

    folder: Path
    logs: Path
    weights: Path
    maps: tuple[PathMap, ...]
    manifest: str


@dataclass
class ManifestObjects:
    """Objects of the manifest's file that pods refer to. Replaced when the file changes."""

    secrets: Mapping[str, Object] = field(default_factory=dict)
    config_maps: Mapping[str, Object] = field(default_factory=dict)


class Machine:
    """`changed` is called whenever something happened that the plan may want to know."""

    def __init__(self, ground: MachineFolders, front: LocalProxy, changed: Callable[[], None]) -> None:
        self.store = Store(ground.folder / "children")
        self.given = ManifestObjects()
        self.service_url = ""
        self._ground = ground
        self._front = front
        self._changed = changed
        self._runners: dict[str, PodRunner] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._leader_ports: dict[str, int] = {}
        self._client = report_client()
        self._leaders = LocalLeaders(self._client, changed)
        self._count = itertools.count()
        self._key = secrets.token_bytes(32)

    @property
    def pods(self) -> Sequence[LocalPod]:
        return [runner.pod for runner in self._runners.values()]

    def observe(self, service: Service) -> Observed:
        seen = observe(service, self.store.objects, self.pods, SETTINGS, socket.gethostname(), time.time(), self._key)
        return replace(seen, answers=self._leaders.answers)

    def carry_out(self, decision: Decision) -> None:
        """In the order that a cluster would see."""
        for manifest in decision.create:
            self.store.create(manifest)
        for manifest in decision.apply:
            self.store.apply(manifest)
        for delete in decision.delete:
            self._delete(delete)
        for call in decision.scale:
            leader = self._runners.get(f"{call.group}-0")
            if leader is not None:
                self._leaders.tell(call, leader.pod)
        self.settle()

    def settle(self) -> None:
        """Starts and stops pods as the StatefulSets say, and sends new connections to those that are ready."""
        for name in [name for name, runner in self._runners.items() if runner.is_gone]:
            del self._runners[name]
            self._readers.pop(name).cancel()
        groups = self.store.of_kind("StatefulSet")
        for pod in surplus_pods(groups, self.pods):
            self._runners[pod.name].stop()
        for missing in missing_pods(groups, self.pods):
            self._start(missing)
        for pod in self.pods:
            if pod.group in groups:
                bring_late(groups[pod.group]["spec"]["template"], self._objects(), pod.folder)
        self._front.set_ready([(LOCALHOST, pod.endpoint_port) for pod in self.pods if _takes_requests(pod)])

    def remove_all(self) -> None:
        """As if the service were deleted: everything that it owns goes, and pods drain."""
        for kind, name in list(self.store.objects):
            self.store.delete(kind, name, self.store.objects[kind, name]["metadata"]["uid"])
        self.settle()

    def kill_all(self) -> None:
        for runner in self._runners.values():
            runner.kill()

    async def close(self) -> None:
        """Nothing is left running."""
        self.kill_all()
        for reader in self._readers.values():
            reader.cancel()
        await self._leaders.close()
        for runner in self._runners.values():
            await runner.wait()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        await self._client.aclose()

    def _delete(self, delete: Delete) -> None:
        if delete.kind != "Pod":
            self.store.delete(delete.kind, delete.name, delete.uid)
            return
        runner = self._runners.get(delete.name)
        if runner is not None and runner.pod.uid == delete.uid:
            runner.stop(delete.grace_seconds)

    def _start(self, missing: MissingPod) -> None:
        folder = self._ground.folder / "pods" / missing.name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pod = LocalPod(
            name=missing.name,
            group=missing.group,
            group_uid=missing.group_uid,
            revision=missing.revision,
            number=missing.number,
            folder=folder,
            scratch=self._scratch(),
            log=self._ground.logs / f"{missing.name}.log",
        )
        self._runners[pod.name] = PodRunner(pod, lambda: self._prepare(pod), self._changed)
        self._readers[pod.name] = asyncio.create_task(follow_reports(pod, self._client, self._changed))

    def _scratch(self) -> Path:
        """What a killed process leaves in /tmp would stay for ever; what it leaves here goes with the run."""
        folder = self._ground.folder / str(next(self._count))
        folder.mkdir(mode=0o700)
        return folder

    def _prepare(self, pod: LocalPod) -> Launch:
        """For each start anew: ports may be taken by now, and a Secret may have come into the file. Raises LaunchError."""
        group = self.store.of_kind("StatefulSet").get(pod.group)
        if group is None:
            raise LaunchError(f"its StatefulSet {pod.group!r} is gone")
        pod.endpoint_port, pod.admin_port = free_ports(2)
        leader_port = pod.admin_port
        if int(group["spec"]["replicas"]) > 1:
            leader_port = self._leader_port(pod.group_uid)
            pod.admin_port = leader_port if pod.number == 0 else pod.admin_port
        ground = self._ground
        place = PodPlacement(
            folder=pod.folder,
            scratch=pod.scratch,
            weights=ground.weights,
            endpoint_port=pod.endpoint_port,
            admin_port=pod.admin_port,
            service_url=self.service_url,
            leader=f"{LOCALHOST}:{leader_port}",
            maps=ground.maps,
        )
        return launch(pod.name, pod.uid, group, self._objects(), place)

    def _objects(self) -> Objects:
        return Objects(
            secrets={**self.given.secrets, **self.store.of_kind("Secret")},
            config_maps={**self.given.config_maps, **self.store.of_kind("ConfigMap")},
            manifest=self._ground.manifest,
        )

    def _leader_port(self, group_uid: str) -> int:
        """The same for the group's life: its other pods know it, however often the leader starts."""
        if group_uid not in self._leader_ports:
            self._leader_ports[group_uid] = free_ports(1)[0]
        return self._leader_ports[group_uid]


def _takes_requests(pod: LocalPod) -> bool:
    return pod.deleted_at is None and pod.pid is not None and pod.report is not None and pod.report.ready
