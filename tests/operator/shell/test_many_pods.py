"""Three thousand pods of paper in one service, with a real API server and a running operator: its status stays small and calm."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable

import pytest
from starling_agent.contract.report import Progress, Topology

from tests.operator.shell.agents import Agent
from tests.operator.shell.cluster import SERVICES, Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.process import OperatorProcess
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

pytestmark = [pytest.mark.whole, pytest.mark.timeout(3000)]
GROUPS, NODES = 12, 250
SECONDS = 20.0
"""For so long one pod or another has news, many times a second."""
MOST_BYTES = 256 * 1024
MOST_PROCESSOR = 0.6
"""Part of a core that news may take. Deciding upon each piece by itself takes all of it."""
MOST_MEMORY = 256 << 20
"""Bytes of the operator in all, as many as the chart requests."""
AT_ONCE = 5
"""Writes of what readers wait for, which no other write delays: a condition that comes true."""
LOADING = {"phase": "loading", "ready": False, "token_seen": False, "service_token_seen": False}
SERVING = {"phase": "serving", "ready": True, "token_seen": True, "service_token_seen": True, "progress": None}


@pytest.fixture
def admit() -> Callable[[Manifest, Agent], Agent]:
    """Agents load, until the test lets them serve."""

    def loads(_: Manifest, agent: Agent) -> Agent:
        agent.update(**LOADING, topology=Topology(tensor=NODES, pipeline=1, data=1, ranks=NODES))
        return agent

    return loads


class Measured:
    """Times of the operator's writes of a status, and its processor time, since `begin`."""

    def __init__(self, operator: OperatorProcess, proxy: Proxy, path: str) -> None:
        self._operator, self._proxy, self._path = operator, proxy, path
        self.begin()
        proxy.after_write = self._note

    def begin(self) -> None:
        self._written: list[float] = []
        self._began, self._cpu = time.monotonic(), self._operator.cpu_seconds

    def _note(self, _: int) -> None:
        if self._proxy.writes[-1].path.partition("?")[0] == self._path:
            self._written.append(time.monotonic())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def processor(self) -> float:
        """Part of a core that the operator took."""
        return (self._operator.cpu_seconds - self._cpu) / self.seconds

    def shows(self, what: str) -> int:
        """Prints what was seen. Returns the number of writes."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self._written)]
        cpu, memory = self.processor, self._operator.memory_bytes >> 20
        least = f", at least {min(gaps):.2f} s apart" if gaps else ""
        print(f"{what}: {self.seconds:.0f} s, {len(self._written)} writes of the status{least}, {cpu:.0%} of a core, {memory} MiB")
        return len(self._written)


async def test_a_status_of_three_thousand_pods_is_small_and_written_once_a_second(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy, kubelet: Kubelet
) -> None:
    kubelet.sees = {"fieldSelector": "status.phase=Pending"}  # a list of all is tens of megabytes
    operator = await start_operator()
    measured = Measured(operator, proxy, f"{SERVICES.format(cluster.namespace)}/chat/status")
    await cluster.apply(manifest(replicas=GROUPS, parallelism={"tensor": NODES}))

    async def all_load() -> bool:
        await asyncio.sleep(1)
        if not operator.is_running:  # its Lease was lost on a machine that stood still; a Deployment starts it again, too
            print(f"the operator was started again, with {len(kubelet.agents)} agents there")
            await operator.started()
            measured.begin()
        return len(kubelet.agents) == GROUPS * NODES and all(agent.polls for agent in kubelet.agents.values())

    await until(all_load, "all agents to be asked", 2400, lambda: cluster.condition("chat", "Ready"))
    assert measured.shows(f"until {GROUPS * NODES} agents are known") <= measured.seconds + AT_ONCE

    agents, sizes = itertools.cycle(kubelet.agents.values()), []
    measured.begin()
    for count in itertools.count(1):
        next(agents).update(progress=Progress(done=count, total=10**6, unit="tensors"))
        await asyncio.sleep(0.02)
        if count % 50 == 0:
            sizes.append(len(json.dumps(await cluster.service("chat"), separators=(",", ":"))))
        if measured.seconds > SECONDS:
            break
    processor = measured.processor
    written = measured.shows(f"{count} pieces of news, a status of {max(sizes)} bytes")
    assert count > 10 * SECONDS and 0 < written <= SECONDS + 1
    assert processor < MOST_PROCESSOR
    assert max(sizes) < MOST_BYTES

    measured.begin()
    for pod in await cluster.pods():
        kubelet.agent(pod["metadata"]["name"]).update(**SERVING)
        await kubelet.set_status(pod)
    await cluster.ready("chat", 600)
    assert measured.shows("until all serve") <= measured.seconds + AT_ONCE
    assert len(json.dumps(await cluster.service("chat"), separators=(",", ":"))) < MOST_BYTES
    await operator.settled()
    measured.begin()
    await asyncio.sleep(SECONDS)
    assert measured.shows("quiet") == 0
    assert operator.memory_bytes < MOST_MEMORY
