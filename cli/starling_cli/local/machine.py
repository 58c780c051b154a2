"""This machine as a cluster: carries out decisions, and runs the processes that the StatefulSets want."""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from starling_agent.client.agent_client import AgentClient
from starling_operator.plan import labels
from starling_operator.plan.decision import Decision, Delete
from starling_operator.plan.observed import Manifest, Observed, Service, Settings

from starling_cli.local.children import LocalChildren
from starling_cli.local.launch import Launch, PodPlacement, launch
from starling_cli.local.leaders import LocalLeaders
from starling_cli.local.machine_folders import MachineFolders
from starling_cli.local.observe import observe
from starling_cli.local.pod import LocalPod, PodRunner
from starling_cli.local.ports import LOCALHOST, free_ports
from starling_cli.local.proxy import LocalProxy
from starling_cli.local.reports import CONNECT_SECONDS, follow_reports
from starling_cli.local.routers import LocalRouter, LocalRouters
from starling_cli.local.stateful_sets import MissingPod, missing_pods, surplus_pods
from starling_cli.local.volumes import LaunchError, Object, Objects, add_late_config_maps

SETTINGS = Settings(agent_image="this installation of starling")


@dataclass
class ManifestObjects:
    """Objects of the manifest's file that pods refer to. Replaced when the file changes."""

    secrets: Mapping[str, Object] = field(default_factory=dict)
    config_maps: Mapping[str, Object] = field(default_factory=dict)


class Machine:
    """Objects and pods of this machine. `changed` is called after everything that may change the plan."""

    def __init__(self, folders: MachineFolders, proxy: LocalProxy, changed: Callable[[], None]) -> None:
        self.children = LocalChildren(folders.folder / "children")
        self.manifest_objects = ManifestObjects()
        self.service_url = ""
        self._folders = folders
        self._proxy = proxy
        self._changed = changed
        self._runners: dict[str, PodRunner[LocalPod]] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._leader_ports: dict[str, int] = {}
        self._client = AgentClient(CONNECT_SECONDS)
        self._leaders = LocalLeaders(self._client, changed)
        self._routers = LocalRouters(folders, self._objects, self._client, changed)
        self._routed = False
        """True while clients are led to routers, and agents are told so."""
        self._key = secrets.token_bytes(32)

    @property
    def pods(self) -> Sequence[LocalPod]:
        return [runner.pod for runner in self._runners.values()]

    @property
    def routers(self) -> Sequence[LocalRouter]:
        return self._routers.pods

    @property
    def is_empty(self) -> bool:
        """True when no process is left."""
        return not self.pods and not self.routers

    def observe(self, service: Service) -> Observed:
        children, routers = self.children.objects, self._routers.pods
        seen = observe(service, children, self.pods, routers, SETTINGS, socket.gethostname(), time.time(), self._key)
        return replace(seen, answers=self._leaders.answers)

    def carry_out(self, decision: Decision, admin_token: str) -> None:
        """Carries out a decision in the order that a cluster would see."""
        self._routers.notify(decision.notice, admin_token)
        for manifest in decision.create:
            self.children.create(manifest)
        for manifest in decision.apply:
            self.children.apply(manifest)
        for delete in decision.delete:
            self._delete(delete)
        for call in decision.scale_calls:
            leader = self._runners.get(f"{call.group}-0")
            if leader is not None:
                self._leaders.send(call, leader.pod)
        self.reconcile_pods()

    def reconcile_pods(self) -> None:
        """Starts and stops pods as Deployment and StatefulSets say, and sends new connections to those that are ready."""
        # Routers first: where all is to end, they take no new request when the first group begins to.
        self._routers.reconcile(next(iter(self.children.of_kind("Deployment").values()), None), self.pods)
        self._set_routed(any(map(_leads_to_routers, self.children.of_kind("Service").values())))
        for name in [name for name, runner in self._runners.items() if runner.is_gone]:
            del self._runners[name]
            self._readers.pop(name).cancel()
        groups = self.children.of_kind("StatefulSet")
        for pod in surplus_pods(groups, self.pods):
            self._runners[pod.name].stop()
        for missing in missing_pods(groups, self.pods):
            self._start(missing)
        for pod in self.pods:
            if pod.group in groups:
                add_late_config_maps(groups[pod.group]["spec"]["template"], self._objects(), pod.folder)
        ready = self._routers.ready if self._routed else [pod for pod in self.pods if pod.is_ready]
        self._proxy.set_ready([(LOCALHOST, pod.endpoint_port) for pod in ready])

    def remove_all(self) -> None:
        """Removes everything that the service owns, as its deletion would; pods drain."""
        self._routers.end_all()
        for kind, name in list(self.children.objects):
            self.children.delete(kind, name, self.children.objects[kind, name]["metadata"]["uid"])
        self.reconcile_pods()

    def kill_all(self) -> None:
        self._routers.kill_all()
        for runner in self._runners.values():
            runner.kill()

    async def close(self) -> None:
        """Leaves nothing running."""
        self.kill_all()
        for reader in self._readers.values():
            reader.cancel()
        await self._leaders.close()
        await self._routers.close()
        for runner in self._runners.values():
            await runner.wait()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        await self._client.close()

    def _delete(self, delete: Delete) -> None:
        if delete.kind != "Pod":
            self.children.delete(delete.kind, delete.name, delete.uid)
            return
        runner = self._runners.get(delete.name)
        if runner is not None and runner.pod.uid == delete.uid:
            runner.stop(delete.grace_seconds)

    def _start(self, missing: MissingPod) -> None:
        folder, scratch, log = self._folders.of_pod(missing.name)
        pod = LocalPod(
            name=missing.name,
            group=missing.group,
            group_uid=missing.group_uid,
            revision=missing.revision,
            number=missing.number,
            folder=folder,
            scratch=scratch,
            log=log,
        )
        self._runners[pod.name] = PodRunner(pod, lambda: self._prepare(pod), self._changed)
        self._read(pod)

    def _set_routed(self, routed: bool) -> None:
        """Tells agents at once whether clients are led to routers: they answer nobody else then."""
        if routed is self._routed:
            return
        self._routed = routed
        for pod in self.pods:
            self._readers.pop(pod.name).cancel()
            self._read(pod)

    def _read(self, pod: LocalPod) -> None:
        self._readers[pod.name] = asyncio.create_task(follow_reports(pod, self._client, self._routed, self._changed))

    def _prepare(self, pod: LocalPod) -> Launch:
        """Prepares each start: ports may be taken by now, and the file may have a new Secret. Raises LaunchError."""
        group = self.children.of_kind("StatefulSet").get(pod.group)
        if group is None:
            raise LaunchError(f"its StatefulSet {pod.group!r} is gone")
        pod.endpoint_port, pod.admin_port = free_ports(2)
        leader_port = pod.admin_port
        if int(group["spec"]["replicas"]) > 1:
            leader_port = self._leader_port(pod.group_uid)
            pod.admin_port = leader_port if pod.number == 0 else pod.admin_port
        folders = self._folders
        placement = PodPlacement(
            folder=pod.folder,
            scratch=pod.scratch,
            weights=folders.weights,
            endpoint_port=pod.endpoint_port,
            admin_port=pod.admin_port,
            service_url=self.service_url,
            leader=f"{LOCALHOST}:{leader_port}",
            maps=folders.maps,
        )
        return launch(pod.name, pod.uid, group, self._objects(), placement)

    def _objects(self) -> Objects:
        return Objects(
            secrets={**self.manifest_objects.secrets, **self.children.of_kind("Secret")},
            config_maps={**self.manifest_objects.config_maps, **self.children.of_kind("ConfigMap")},
            manifest=self._folders.manifest,
        )

    def _leader_port(self, group_uid: str) -> int:
        """Returns the leader's port, which stays for the group's life: its other pods know it."""
        if group_uid not in self._leader_ports:
            self._leader_ports[group_uid] = free_ports(1)[0]
        return self._leader_ports[group_uid]


def _leads_to_routers(service: Manifest) -> bool:
    return bool(service["metadata"]["labels"].get(labels.ROLE) == labels.ROUTING)
