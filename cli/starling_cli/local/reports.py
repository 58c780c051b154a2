"""Reads the agents' reports by long poll, as the operator does."""

import asyncio
import time
from collections.abc import Callable

from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.report import Report

from starling_cli.local.pod import LocalPod
from starling_cli.local.ports import LOCALHOST

WAIT_SECONDS = 15.0
CONNECT_SECONDS = 2.0
_GRACE_SECONDS = 10.0
_RETRY_SECONDS = 0.1


async def follow_reports(pod: LocalPod, client: AgentClient, routed: bool, changed: Callable[[], None]) -> None:
    """Keeps `pod.report` up to date until it is cancelled. While the process does not run or answer, it tries again.

    `routed` tells the agent that clients are led to routers, and that it is to answer nobody else.
    """
    while True:
        report = await _poll(pod, client, routed)
        if report is None:
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        news = pod.report is None or (report.incarnation, report.version) != (pod.report.incarnation, pod.report.version)
        pod.report, pod.report_at = report, time.time()
        if news:
            changed()


async def _poll(pod: LocalPod, client: AgentClient, routed: bool) -> Report | None:
    launch, pid = pod.launch, pod.pid
    if launch is None or pid is None:
        return None
    address = f"{LOCALHOST}:{pod.admin_port}"
    try:
        report = await client.report(
            address, launch.token, known=pod.report, wait=WAIT_SECONDS, routed=routed, seconds=WAIT_SECONDS + _GRACE_SECONDS
        )
    except (NoAnswer, AgentRefusal, BadAnswer):
        return None
    if pod.pid != pid:
        return None
    # The plan compares with the hash of its own configuration, without this machine's ports and paths.
    same = report.config_hash == launch.config_hash
    return report.model_copy(update={"config_hash": launch.cluster_config_hash}) if same else report
