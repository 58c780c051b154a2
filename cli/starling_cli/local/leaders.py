"""Tells the leaders of groups on this machine about operations, as the operator does (`leaders.py`)."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from starling_agent.contract.scale import ScaleRequest
from starling_operator.agents.answers import MOST_SECONDS, PLAIN, BadAnswer, received
from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.elastic.answers import refusal
from starling_operator.plan.observed import LeaderAnswer

from starling_cli.local.pod import LocalPod
from starling_cli.local.ports import LOCALHOST

PAUSE = 1.0
"""Seconds between two tries of the same call."""


class LocalLeaders:
    """`changed` is called when a leader has answered."""

    def __init__(self, client: httpx.AsyncClient, changed: Callable[[], None]) -> None:
        self._client, self._changed = client, changed
        self._answers: dict[str, LeaderAnswer] = {}
        self._newest: dict[str, tuple[ScaleCall, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def answers(self) -> Mapping[str, LeaderAnswer]:
        """Refusals by operation."""
        return dict(self._answers)

    def tell(self, call: ScaleCall, leader: LocalPod) -> None:
        """At most once in PAUSE; its answer comes later."""
        last, now = self._newest.get(call.group), time.monotonic()
        if last is not None and last[0] == call and now - last[1] < PAUSE:
            return
        if last is not None and last[0].operation != call.operation:
            self._answers.pop(last[0].operation, None)
        self._newest[call.group] = (call, now)
        task = asyncio.create_task(self._send(call, leader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, call: ScaleCall, leader: LocalPod) -> None:
        if leader.launch is None:
            return
        url, headers = (
            f"http://{LOCALHOST}:{leader.admin_port}/admin/scale",
            {"Authorization": f"Bearer {leader.launch.token}", **PLAIN},
        )
        how: dict[str, Any] = {"params": {"operation": call.operation}}
        if call.data is not None:
            how = {"json": ScaleRequest(operation=call.operation, data=call.data).model_dump()}
        method = "DELETE" if call.data is None else "PUT"
        try:
            async with asyncio.timeout(MOST_SECONDS), self._client.stream(method, url, headers=headers, **how) as response:
                text = await received(response.aiter_raw())
        except (httpx.HTTPError, TimeoutError, BadAnswer):
            return
        if response.is_error:
            self._answers[call.operation] = refusal(response.status_code, text.decode(errors="replace"))
        else:
            self._answers.pop(call.operation, None)
        self._changed()
