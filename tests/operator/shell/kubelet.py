"""A node that runs no containers: it binds pods, gives them addresses with agents behind, and lets them go when deleted."""

import asyncio
import base64
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.operator.shell.agents import Agent, AgentServer, serving
from tests.operator.shell.cluster import PODS, Cluster, Manifest, until_next_turn

NODE = "paper"
STRATEGIC = "application/strategic-merge-patch+json"
_AT_ONCE = 8


class Kubelet:
    """`admit` decides what the agent of a new pod reports; None: the pod starts no agent.

    holding    new pods are not started
    takes      whether a new pod finds room
    draining   pods that are deleted do not end
    says       the node's Ready condition; "" while the kubelet is silent
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
        self.holding = self.draining = False
        self.takes: Callable[[Manifest], bool] = lambda _: True
        self.says = "True"

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.beat())
            group.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            pods: list[Manifest] = []
            with until_next_turn("the kubelet's pods"):
                pods = await self._cluster.pods()
            for first in range(0, len(pods), _AT_ONCE):
                await asyncio.gather(*(self._look(pod) for pod in pods[first : first + _AT_ONCE]))
            await asyncio.sleep(self._period)

    def agent(self, pod: str) -> Agent:
        return self.agents[pod]

    async def beat(self) -> None:
        """Without it the node would count as dead after ten seconds, and its pods would be deleted."""
        while True:
            if self.says:
                with until_next_turn("the kubelet's node"):
                    await self.say(self.says)
            await asyncio.sleep(2)

    async def say(self, ready: str) -> None:
        """The node's Ready condition, now and from now on."""
        self.says, now = ready, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": ready, "reason": "Paper", "lastHeartbeatTime": now, "lastTransitionTime": now}
        await self._cluster.merge(f"/api/v1/nodes/{self._node}/status", {"status": {"conditions": [condition]}})

    async def _look(self, pod: Manifest) -> None:
        name, address = pod["metadata"]["name"], self._addresses.get(pod["metadata"]["uid"])
        with until_next_turn(f"the kubelet's {name}"):
            if "deletionTimestamp" in pod["metadata"]:
                if not self.draining:
                    await self._end(pod)
            elif address is None and not self.holding and self.takes(pod):
                await self._start(pod)
            elif address and pod["status"]["phase"] == "Pending":
                # It was started, and what was said of it has not come.
                await self.set_status(pod, ready=self.agents[name].report.ready)

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
        agent = self._admit(pod, Agent(await self._report(pod), await self._token(pod)))
        self._addresses[metadata["uid"]] = ""
        if agent is not None:
            self.agents[metadata["name"]] = agent
            self._addresses[metadata["uid"]] = await self._server.add(agent)
            await self.set_status(pod, ready=agent.report.ready)

    async def set_status(self, pod: Manifest, ready: bool = True, **more: Any) -> None:
        """Running, as a kubelet would say it; `more` goes over it."""
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
        # Conditions that are others' stay.
        await self._cluster.call("PATCH", path, {"status": {**status, **more}}, STRATEGIC)

    async def _end(self, pod: Manifest) -> None:
        """As after a drain of no time."""
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
        """As it is mounted. A pod whose Secret is missing is looked at again in the next turn."""
        name = next(volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if volume["name"] == "admin")
        secret = await self._cluster.call("GET", f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{name}")
        return base64.b64decode(secret["data"]["token"]).decode()
