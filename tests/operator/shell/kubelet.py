"""A node that runs no containers: it binds pods, gives them addresses where agents and routers answer, and lets them go."""

import asyncio
import base64
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.operator.shell.agents import Agent, AgentServer, serving
from tests.operator.shell.cluster import PODS, Cluster, Manifest, tolerating_errors

NODE = "paper"
STRATEGIC = "application/strategic-merge-patch+json"
_AT_ONCE = 8


class Kubelet:
    """`admit` decides what the agent of a new pod reports; None: the pod starts no agent.

    router_address   address of each router's pod, where a test answers for it
    sees         query of the pods that it looks at; {}: all
    holding      new pods are not started
    has_room     whether a new pod is scheduled
    draining     pods that are deleted do not end
    node_ready   the node's Ready condition; "" while the kubelet is silent
    """

    def __init__(
        self,
        cluster: Cluster,
        server: AgentServer,
        admit: Callable[[Manifest, Agent], Agent | None],
        period: float = 0.1,
        node: str = NODE,
    ) -> None:
        self._cluster, self._server, self._admit, self._period, self._node = cluster, server, admit, period, node
        self.agents: dict[str, Agent] = {}
        self._addresses: dict[str, str] = {}
        self.router_address = ""
        self.sees: dict[str, str] = {}
        self.holding = self.draining = False
        self.has_room: Callable[[Manifest], bool] = lambda _: True
        self.node_ready = "True"

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.send_heartbeats())
            group.create_task(self._run_pods())

    async def _run_pods(self) -> None:
        while True:
            pods: list[Manifest] = []
            with tolerating_errors("the kubelet's pods"):
                pods = await self._cluster.pods(**self.sees)
            for first in range(0, len(pods), _AT_ONCE):
                await asyncio.gather(*(self._reconcile(pod) for pod in pods[first : first + _AT_ONCE]))
            await asyncio.sleep(self._period)

    def agent(self, pod: str) -> Agent:
        return self.agents[pod]

    async def send_heartbeats(self) -> None:
        """Renews the node's status: after ten seconds without it the node counts as dead, and its pods are deleted."""
        while True:
            if self.node_ready:
                with tolerating_errors("the kubelet's node"):
                    await self.set_node_ready(self.node_ready)
            await asyncio.sleep(2)

    async def set_node_ready(self, ready: str) -> None:
        """Sets the node's Ready condition, now and in later heartbeats."""
        self.node_ready, now = ready, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": ready, "reason": "Paper", "lastHeartbeatTime": now, "lastTransitionTime": now}
        await self._cluster.merge(f"/api/v1/nodes/{self._node}/status", {"status": {"conditions": [condition]}})

    async def _reconcile(self, pod: Manifest) -> None:
        name, address = pod["metadata"]["name"], self._addresses.get(pod["metadata"]["uid"])
        with tolerating_errors(f"the kubelet's {name}"):
            if "deletionTimestamp" in pod["metadata"]:
                if not self.draining:
                    await self._end(pod)
            elif address is None and not self.holding and self.has_room(pod):
                await self._start(pod)
            elif address and pod["status"]["phase"] == "Pending":
                # It was started, and its status did not arrive.
                await self.set_status(pod, ready=name not in self.agents or self.agents[name].report.ready)

    async def _start(self, pod: Manifest) -> None:
        metadata = pod["metadata"]
        path = f"{PODS.format(metadata['namespace'])}/{metadata['name']}"
        if not pod["spec"].get("nodeName"):
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": metadata["name"]},
                "target": {"kind": "Node", "name": self._node},
            }
            await self._cluster.call("POST", f"{path}/binding", binding)
        if "serving.starling.dev/router" in metadata["labels"]:
            self._addresses[metadata["uid"]] = self.router_address or await self._server.add_router()
            await self.set_status(pod)
            return
        agent = self._admit(pod, Agent(await self._report(pod), await self._token(pod)))
        self._addresses[metadata["uid"]] = ""
        if agent is not None:
            self.agents[metadata["name"]] = agent
            self._addresses[metadata["uid"]] = await self._server.add(agent)
            await self.set_status(pod, ready=agent.report.ready)

    async def set_status(self, pod: Manifest, ready: bool = True, **more: Any) -> None:
        """Sets the pod's status to Running, as a kubelet does; `more` overwrites fields."""
        metadata, now = pod["metadata"], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        state = {
            "name": "agent",
            "image": "x",
            "imageID": "x",
            "ready": ready,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }
        reason = {} if ready else {"reason": "ContainersNotReady"}
        conditions = [
            {"type": kind, "status": str(ready), "lastTransitionTime": now, **reason} for kind in ("Ready", "ContainersReady")
        ]
        status = {
            "phase": "Running",
            "podIP": self._addresses[metadata["uid"]],
            "podIPs": [{"ip": self._addresses[metadata["uid"]]}],
            "conditions": conditions,
            "containerStatuses": [state],
        }
        path = f"{PODS.format(metadata['namespace'])}/{metadata['name']}/status"
        # Conditions of others stay.
        await self._cluster.call("PATCH", path, {"status": {**status, **more}}, STRATEGIC)

    async def _end(self, pod: Manifest) -> None:
        """Ends the pod as after a drain that took no time."""
        metadata = pod["metadata"]
        await self._server.remove(self._addresses.pop(metadata["uid"], ""))
        path = f"{PODS.format(metadata['namespace'])}/{metadata['name']}"
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        await self._cluster.call("DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", **options})

    async def _report(self, pod: Manifest) -> Any:
        metadata, labels = pod["metadata"], pod["metadata"]["labels"]
        service, revision = labels["serving.starling.dev/service"], labels["serving.starling.dev/revision"]
        config = await self._cluster.call("GET", f"/api/v1/namespaces/{metadata['namespace']}/configmaps/{service}-{revision}")
        digest = hashlib.sha256(config["data"]["agent.json"].encode()).hexdigest()
        return serving(metadata["name"], labels["serving.starling.dev/group"], revision, service, digest)

    async def _token(self, pod: Manifest) -> str:
        """Returns the mounted token. A pod whose Secret is missing is tried again in the next turn."""
        name = next(volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if volume["name"] == "admin")
        secret = await self._cluster.call("GET", f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{name}")
        return base64.b64decode(secret["data"]["token"]).decode()
