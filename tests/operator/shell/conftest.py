"""A namespace on the real API server, a node of paper, and the operator as a process."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from starling_operator.cluster.kube import Kube
from starling_operator.logs import Key

from tests.kube.apiserver import apiserver as apiserver
from tests.operator.shell.agents import Agent, AgentServer
from tests.operator.shell.cluster import Access, Cluster, Manifest, Refused
from tests.operator.shell.crd import install_crd
from tests.operator.shell.kubelet import NODE, Kubelet
from tests.operator.shell.process import OperatorProcess
from tests.operator.shell.proxy import Proxy
from tests.ports import free_port
from tests.waiting import until

StartOperator = Callable[..., Awaitable[OperatorProcess]]
"""start(*options, altered=(), wait=True): one more operator process, as altered.py alters it; waits until it is ready."""


@pytest.fixture
def woken() -> list[Key]:
    """Services that were woken, one after the other."""
    return []


@pytest.fixture
async def cluster(apiserver: Path) -> AsyncIterator[Cluster]:
    async with aiohttp.ClientSession() as session:
        made = Cluster(Access.of(apiserver), session, f"test-{secrets.token_hex(4)}")
        await install_crd(made)
        await made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.namespace}}, "/api/v1/namespaces")
        # Pods are refused until the controllers have made it.
        account = f"/api/v1/namespaces/{made.namespace}/serviceaccounts"

        async def has_account() -> bool:
            return bool((await made.call("GET", account))["items"])

        await until(has_account, "the service account `default`")
        yield made
        await made.delete(f"/api/v1/namespaces/{made.namespace}")


@pytest.fixture
async def kube(apiserver: Path) -> AsyncIterator[Kube]:
    """The operator's own client, with the rights of an administrator."""
    settings = Configuration()
    await config.load_kube_config(config_file=str(apiserver), client_configuration=settings)
    made = Kube(ApiClient(settings), lambda: 10.0)
    yield made
    await made.close()


@pytest.fixture
async def proxy(cluster: Cluster) -> AsyncIterator[Proxy]:
    made = Proxy(cluster.access)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def admit() -> Callable[[Manifest, Agent], Agent | None]:
    """Lets agents of the test's pods serve at once. A test that needs others has a fixture of this name."""
    return lambda _, agent: agent


@pytest.fixture
def every(request: pytest.FixtureRequest) -> int:
    """Step between the writes after which an operator is killed: each costs some seconds."""
    return 1 if request.config.getoption("--whole") else 5


@pytest.fixture
def node() -> str:
    """Name of the node that all tests share. A test that breaks its node has a fixture of this name."""
    return NODE


@pytest.fixture
async def kubelet(cluster: Cluster, admit: Callable[[Manifest, Agent], Agent | None], node: str) -> AsyncIterator[Kubelet]:
    server = AgentServer(64 + os.getpid() % 128)
    await server.start()
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": {"kubernetes.io/hostname": node}}}
    await cluster.apply(body, "/api/v1/nodes")
    made = Kubelet(cluster, server, admit, node=node)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await server.close()
    if node != NODE:  # tests of other processes have that one, too; many that are gone would stop all evictions
        with suppress(Refused):  # a test may have deleted its node itself
            await cluster.delete(f"/api/v1/nodes/{node}")


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: the client reads $KUBECONFIG when it is imported, and forked operators do not import it again."""
    return tmp_path_factory.mktemp("kubeconfig")


@pytest.fixture
async def start_operator(cluster: Cluster, proxy: Proxy, tmp_path: Path, config_folder: Path) -> AsyncIterator[StartOperator]:
    """Starts operators, which all end with the test."""
    running: list[OperatorProcess] = []

    async def start(*more: str, altered: Sequence[str] = (), wait: bool = True) -> OperatorProcess:
        kubeconfig = proxy.kubeconfig(config_folder)
        process = OperatorProcess(kubeconfig, cluster.namespace, tmp_path, free_port(), *more, altered=altered)
        running.append(process)
        if wait:
            return await process.started()
        await process.start()
        return process

    yield start
    for process in running:
        with suppress(ProcessLookupError):
            process.kill()
        await process.ended()
