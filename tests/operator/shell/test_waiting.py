"""An operator that starts before its API server does, or before its CRD."""

import re
import time
from pathlib import Path

import pytest

from tests.operator.shell.cluster import Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.process import OperatorProcess
from tests.operator.shell.proxy import Proxy
from tests.ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("kubelet")


@pytest.fixture
async def proxy(cluster: Cluster) -> Proxy:
    """A proxy that is not started: nobody listens there yet."""
    made = Proxy(cluster.access)
    made.url = f"http://127.0.0.1:{free_port()}"
    return made


async def _waits(operator: OperatorProcess) -> None:
    async def is_reported() -> bool:
        return "the API server does not answer" in (await operator.get("/readyz"))[1]

    await until(is_reported, f"/readyz to say what it waits for; see {operator.log}")
    assert (await operator.get("/readyz"))[0] == 503
    assert (await operator.get("/healthz"))[0] == 200, "a restart would not help"


async def test_it_waits_for_the_api_server(cluster: Cluster, start_operator: StartOperator, proxy: Proxy) -> None:
    operator = await start_operator(wait=False)
    await _waits(operator)

    async def pauses() -> list[int]:
        found = re.findall(r"the API server does not answer.*; asked again in (\d+) s", operator.log.read_text())
        return [int(each) for each in found] if len(found) > 2 else []

    first, _, third = (await until(pauses, f"it to try again; see {operator.log}"))[:3]
    assert first < third, "with growing pauses"
    await _waits(operator)
    assert "Traceback" not in operator.log.read_text()
    await proxy.start(int(proxy.url.rpartition(":")[2]))
    await until(operator.is_ready, "the operator to be ready", 90)
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await proxy.close()


async def test_it_may_be_stopped_while_it_waits(start_operator: StartOperator) -> None:
    operator = await start_operator(wait=False)
    await _waits(operator)
    began = time.monotonic()
    assert await operator.stop() == 0
    assert time.monotonic() - began < 20
    assert "Unclosed" not in operator.log.read_text()


async def test_an_api_server_that_answers_with_errors_is_waited_for_too(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy, tmp_path: Path
) -> None:
    """Answers like a load balancer whose API servers are all down, to kopf too."""
    del tmp_path
    proxy.refuse = "/api"
    await proxy.start(int(proxy.url.rpartition(":")[2]))
    operator = await start_operator(wait=False)

    async def is_reported() -> bool:
        return "the API server refuses" in (await operator.get("/readyz"))[1]

    await until(is_reported, f"/readyz to say so; see {operator.log}")
    proxy.refuse = ""
    await until(operator.is_ready, "the operator to be ready", 90)
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await proxy.close()
