"""What happens to a service in its life, by plan and by accident: each of them at any moment, under whatever went before."""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from e2e.service.kubectl import Kubectl, Manifest, condition, wait_until
from e2e.service.test_faults import acting
from e2e.service.watched import Watched
from e2e.under_test import OPERATOR_NAMESPACE, ClusterUnderTest

PATIENCE = 300
"""Seconds for what is none of the figures: that a group starts, or that pods go."""


def try_to_evict(kubectl: Kubectl, pod: str) -> bool:
    """Asks once, as a drain does again and again. Returns whether the budget allows it: else the API server answers 429."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": kubectl.namespace}}
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/eviction"
    try:
        kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    except AssertionError as error:
        if "disruption budget" in str(error):
            return False
        raise
    return True


class Disturbances:
    """Of a service with two groups behind routers, which it has again after each; the order comes from `chance`.

    refused          seconds for which each eviction was refused
    killed_routers   when routers were killed, in seconds since the epoch
    """

    def __init__(self, chat: Watched, cluster: ClusterUnderTest, chance: random.Random) -> None:
        self._chat, self._kubectl, self._cluster, self._chance = chat, chat.kubectl, cluster, chance
        self._operators = Kubectl(self._kubectl.program, self._kubectl.kubeconfig, OPERATOR_NAMESPACE)
        self._rollouts = 0
        self._killed: dict[str, int] = {}
        """A killed pod's restarts before, by its uid: its status lags behind."""
        self.refused: list[float] = []
        self.killed_routers: list[float] = []

    def rounds(self) -> Iterator[Callable[[], None]]:
        """Each in some order, and then in others, without an end."""
        kinds = [
            *(
                self.drain_a_node,
                self.drain_another_node,
                self.evict_a_group,
                self.evict_a_router,
                self.update,
                self.update_routers,
            ),
            *(self.scale, self.kill_an_agent, self.kill_an_operator, self.kill_a_router),
        ]
        while True:
            yield from self._chance.sample(kinds, len(kinds))

    def drain_a_node(self) -> None:
        self.drain("n1")

    def drain_another_node(self) -> None:
        self.drain("n2")

    def drain(self, node: str) -> None:
        """Drains as an administrator does: all that is on the node goes elsewhere, and the node takes pods again."""
        self._kubectl("cordon", node)
        try:
            pods = [pod for pod in [*self._chat.pods(), *self._found_routers()] if pod["spec"].get("nodeName") == node]
            with ThreadPoolExecutor(max(1, len(pods))) as at_once:
                list(at_once.map(self._evict, pods))
            going = {pod["metadata"]["uid"] for pod in pods}
            wait_until(f"{node} is empty", lambda: not going & self.present(), PATIENCE, self._chat.explain)
        finally:
            self._kubectl("uncordon", node)

    def evict_a_group(self) -> None:
        """Without a cordon, as a descheduler does it."""
        self._evict(self._chance.choice(self._serving(2)))

    def evict_a_router(self) -> None:
        self._evict(self._chance.choice(self._routers()))

    def update(self) -> None:
        self._rollouts += 1
        self._chat.patch(template={"metadata": {"annotations": {"example.com/rollout": str(self._rollouts)}}})
        self._settle()

    def scale(self) -> None:
        for replicas in (1, 4, 1, 2):
            self._chat.patch(replicas=replicas)
            self._settle()

    def update_routers(self) -> None:
        self._rollouts += 1
        self._chat.patch(router={"hold": {"requests": 1000 + self._rollouts}})
        self._kubectl("rollout", "status", f"deployment/{self._chat.name}-router", f"--timeout={PATIENCE}s")

    def kill_an_agent(self) -> None:
        """While another group serves, to which its streams can go."""
        victim = self._chance.choice(self._serving(2))
        self._kill(victim, "starling agent")

    def kill_an_operator(self) -> None:
        self._operators("delete", "pod", acting(self._operators)["metadata"]["name"], "--grace-period=0", "--force")

    def kill_a_router(self) -> None:
        self._kill_router(self._chance.choice(self._routers()))

    def kill_all_routers(self) -> None:
        for router in self._routers():
            self._kill_router(router)

    def present(self) -> set[str]:
        """Returns the uids of all pods that are there, those that go included."""
        return {pod["metadata"]["uid"] for pod in [*self._chat.pods(), *self._found_routers()]}

    def _kill_router(self, pod: Manifest) -> None:
        self.killed_routers.append(time.time())
        self._kill(pod, "starling router")

    def _kill(self, pod: Manifest, command: str) -> None:
        uid = pod["metadata"]["uid"]
        self._killed[uid] = _restarts(pod)
        assert self._cluster.kill(uid, command) > 0

    def _evict(self, pod: Manifest) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

        def is_let_go() -> bool:
            try:
                allowed = try_to_evict(self._kubectl, name)
            except AssertionError:
                return uid not in self.present()
            if not allowed:
                time.sleep(1)
            return allowed

        self.refused.append(wait_until(f"{name} may be evicted", is_let_go, PATIENCE, self._chat.explain))

    def _serving(self, least: int) -> list[Manifest]:
        """Pods that serve and stay, once there are so many."""
        found: list[Manifest] = []

        def enough() -> bool:
            found[:] = filter(self._serves, self._chat.pods())
            return len(found) >= least

        wait_until(f"{least} pods serve", enough, PATIENCE, self._chat.explain)
        return found

    def _routers(self) -> list[Manifest]:
        """Once both serve: one of them stays, and clients find it."""
        found: list[Manifest] = []

        def enough() -> bool:
            found[:] = filter(self._serves, self._found_routers())
            return len(found) >= 2

        wait_until("two routers serve", enough, PATIENCE, self._chat.explain)
        return found

    def _found_routers(self) -> list[Manifest]:
        return self._kubectl.find("pods", f"serving.starling.dev/router={self._chat.name}")

    def _settle(self) -> None:
        """Until it is as its spec says, and no pod more."""

        def settled() -> bool:
            service = self._chat.now
            return self._chat.is_true("Ready") and len(self._chat.pods()) == service["spec"]["replicas"]

        wait_until("the spec is carried out", settled, PATIENCE, self._chat.explain)

    def _serves(self, pod: Manifest) -> bool:
        """Returns whether a pod is ready and stays; one that was killed, only once it has begun again."""
        is_ready = condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]
        return is_ready and self._killed.get(pod["metadata"]["uid"], -1) < _restarts(pod)


def _restarts(pod: Manifest) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", ()))
