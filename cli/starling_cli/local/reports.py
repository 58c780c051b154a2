"""Reads the agents' reports by long poll, as the operator does."""

import asyncio
import time
from collections.abc import Callable

import httpx
from starling_agent.contract.report import Report
from starling_operator.agents.answers import PLAIN, BadAnswer, read_report, received

from starling_cli.local.pod import LocalPod
from starling_cli.local.ports import LOCALHOST

WAIT_SECONDS = 15
_TIMEOUT = httpx.Timeout(WAIT_SECONDS + 10.0, connect=2.0)
_RETRY_SECONDS = 0.1


async def follow_reports(pod: LocalPod, client: httpx.AsyncClient, changed: Callable[[], None]) -> None:
    """Keeps `pod.report` up to date until it is cancelled. While the process is not there or silent, it tries again."""
    while True:
        report = await _ask(pod, client)
        if report is None:
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        news = pod.report is None or (report.incarnation, report.version) != (pod.report.incarnation, pod.report.version)
        pod.report, pod.report_at = report, time.time()
        if news:
            changed()


def report_client() -> httpx.AsyncClient:
    """Without the proxies of the environment: it talks to this machine only."""
    return httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)


async def _ask(pod: LocalPod, client: httpx.AsyncClient) -> Report | None:
    launch, pid = pod.launch, pod.pid
    if launch is None or pid is None:
        return None
    known = pod.report
    query: dict[str, str | int] = {"wait": WAIT_SECONDS}
    if known is not None:
        query |= {"after": known.version, "incarnation": known.incarnation}
    url, headers = f"http://{LOCALHOST}:{pod.admin_port}/admin/report", {"Authorization": f"Bearer {launch.token}", **PLAIN}
    try:
        async with asyncio.timeout(WAIT_SECONDS + 10.0), client.stream("GET", url, params=query, headers=headers) as answer:
            report = read_report(await received(answer.raise_for_status().aiter_raw()))
    except (httpx.HTTPError, TimeoutError, BadAnswer):
        return None
    if pod.pid != pid:
        return None
    # The plan looks for the configuration as it made it, before this machine's ports and paths came in.
    same = report.config_hash == launch.config_hash
    return report.model_copy(update={"config_hash": launch.cluster_config_hash}) if same else report
