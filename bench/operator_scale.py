"""Measures what many services cost the operator, on a real API server, with pods of paper whose agents and routers answer polls.

    python bench/operator_scale.py [--services 500] [--groups 2] [--routers 0]

Each section of bench/results/operator.md is of one number of groups and routers, and written anew.
"""

import argparse
import asyncio
import contextlib
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from sections import write_section

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.kube.apiserver import started  # noqa: E402
from tests.operator.shell.agents import AgentServer  # noqa: E402
from tests.operator.shell.cluster import CHILD_PATHS, SERVICES, Access, Cluster, manifest  # noqa: E402
from tests.operator.shell.crd import install_crd  # noqa: E402
from tests.operator.shell.kubelet import NODE, Kubelet  # noqa: E402
from tests.operator.shell.process import OperatorProcess  # noqa: E402
from tests.waiting import until  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "operator.md"
QUIET_SECONDS = 180.0
CHANGES = 25
NAMESPACE = "many"


@dataclass
class Results:
    """Rows of the table: question, figure, target."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, question: str, figure: str, target: str = "") -> None:
        self.rows.append((question, figure, target))
        print(f"{question}: {figure}" + (f" (target {target})" if target else ""), flush=True)


async def measure(kubeconfig: Path, folder: Path, services: int, groups: int, routers: int) -> Results:
    results = Results()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as session:
        cluster = Cluster(Access.of(kubeconfig), session, NAMESPACE)
        await _prepare(cluster)
        async with _node(cluster):
            operator = OperatorProcess(kubeconfig, NAMESPACE, folder, 18099)
            await _apply_all(cluster, services, groups, routers)
            try:
                await _from_nothing(operator, cluster, services, groups, results)
                await _quiet(operator, results)
                await _changes(cluster, services, results)
                await _restart(operator, services, results)
            finally:
                await operator.stop()
    return results


async def _prepare(cluster: Cluster) -> None:
    await install_crd(cluster)
    await cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}, "/api/v1/nodes")
    await cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, "/api/v1/namespaces")


@contextlib.asynccontextmanager
async def _node(cluster: Cluster) -> AsyncIterator[None]:
    server = AgentServer(77)
    await server.start()
    task = asyncio.create_task(Kubelet(cluster, server, lambda _, agent: agent, period=1.0).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.close()


async def _apply_all(cluster: Cluster, services: int, groups: int, routers: int) -> None:
    router = {"router": {"replicas": routers}} if routers else {}
    for first in range(0, services, 10):
        names = [f"svc-{number:04}" for number in range(first, min(first + 10, services))]
        await asyncio.gather(*(cluster.apply(manifest(name, replicas=groups, **router)) for name in names))


async def _from_nothing(operator: OperatorProcess, cluster: Cluster, services: int, groups: int, results: Results) -> None:
    began = time.monotonic()
    await operator.start()

    async def has_children() -> bool:
        sets = await cluster.call("GET", CHILD_PATHS["StatefulSet"].format(NAMESPACE), resourceVersion="0")
        return len(sets["items"]) >= services * groups

    await until(has_children, "all StatefulSets", 600)
    results.add("from nothing to all children written", f"{time.monotonic() - began:.0f} s", "180 s")
    await until(lambda: _all_ready(cluster, services), "all services to be ready", 900)
    results.add("from nothing to all services Ready, pods of paper included", f"{time.monotonic() - began:.0f} s")
    results.add("CPU time for that", f"{operator.cpu_seconds:.0f} s")


async def _all_ready(cluster: Cluster, services: int) -> bool:
    await asyncio.sleep(1)
    items = (await cluster.call("GET", SERVICES.format(NAMESPACE), resourceVersion="0"))["items"]
    ready = [
        item
        for item in items
        if any(each["type"] == "Ready" and each["status"] == "True" for each in item.get("status", {}).get("conditions", ()))
    ]
    return len(ready) == services


async def _quiet(operator: OperatorProcess, results: Results) -> None:
    """Long polls come back every 45 s and the audit lists every minute: whole numbers of both are in it."""
    await asyncio.sleep(15)
    runs, cpu, began = await operator.metric("starling_operator_reconcile_total"), operator.cpu_seconds, time.monotonic()
    await asyncio.sleep(QUIET_SECONDS)
    used = (operator.cpu_seconds - cpu) / (time.monotonic() - began)
    runs = await operator.metric("starling_operator_reconcile_total") - runs
    results.add(f"quiet, over {QUIET_SECONDS:.0f} s: CPU", f"{used:.1%} of a core", "6 %")
    results.add("quiet: reconciles in that time", f"{runs:.0f}")
    results.add("quiet: memory (RSS)", f"{operator.memory_bytes / 2**20:.0f} MiB")


async def _changes(cluster: Cluster, services: int, results: Results) -> None:
    """A new port of one service, until its Service has it."""
    times = []
    for number in range(CHANGES):
        name, port = f"svc-{number * 7 % services:04}", 8080 + number
        path, began = f"{CHILD_PATHS['Service'].format(NAMESPACE)}/{name}", time.monotonic()
        await cluster.edit(name, {"endpoint": {"port": port}})

        async def has_port(path: str = path, port: int = port) -> bool:
            ports = (await cluster.call("GET", path))["spec"]["ports"]
            return any(each["port"] == port for each in ports)

        await until(has_port, f"port {port} of {name}", 30)
        times.append(time.monotonic() - began)
        await asyncio.sleep(0.3)
    results.add("change of a spec to change of its child: median", f"{statistics.median(times) * 1000:.0f} ms")
    results.add(f"change of a spec to change of its child: slowest of {CHANGES}", f"{max(times) * 1000:.0f} ms", "1 s")


async def _restart(operator: OperatorProcess, services: int, results: Results) -> None:
    await operator.stop()
    began = time.monotonic()
    await operator.start()

    async def is_settled() -> bool:
        before = await operator.metric("starling_operator_reconcile_total")
        await asyncio.sleep(1)
        return before >= services and before == await operator.metric("starling_operator_reconcile_total")

    await until(is_settled, "the operator to have looked at all services", 300)
    results.add("restart until all services were looked at and nothing is left to do", f"{time.monotonic() - began:.0f} s", "180 s")
    results.add("restart: writes", f"{await operator.metric('starling_operator_api_writes_total'):.0f}")
    results.add("restart: memory (RSS)", f"{operator.memory_bytes / 2**20:.0f} MiB")


def write(results: Results, services: int, groups: int, routers: int, load: float) -> None:
    day = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    head = f"{day}. {os.cpu_count()} cores, Python {platform.python_version()}. Load before: {load:.1f}."
    lines = [
        head,
        "",
        f"{services} services, on a real API server on this machine. Pods are paper; agents and routers are real HTTP servers that"
        " answer long polls.",
        "",
        "| | | target |",
        "|---|---:|---:|",
        *(f"| {question} | {figure} | {target} |" for question, figure, target in results.rows),
    ]
    write_section(RESULTS, "The operator at scale", f"Services of {groups} groups and {routers} routers", "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=500)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--routers", type=int, default=0, help="of each service")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with started("--controllers") as kubeconfig, tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(kubeconfig, Path(folder), options.services, options.groups, options.routers))
    write(results, options.services, options.groups, options.routers, load)


if __name__ == "__main__":
    main()
