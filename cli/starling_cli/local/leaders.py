"""Sends operations to the leaders of groups on this machine, as the operator does."""

import asyncio
import time
from collections.abc import Callable, Mapping

from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_operator.agents.leaders import send_call
from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.observed import LeaderRefusal

from starling_cli.local.pod import LocalPod
from starling_cli.local.ports import LOCALHOST

PAUSE = 1.0
"""Seconds between two tries of the same call."""
SECONDS = 10.0
"""Time for one call; nothing waits for its answer."""


class LocalLeaders:
    """Remembers the newest call to each group. `changed` is called when a leader has answered."""

    def __init__(self, client: AgentClient, changed: Callable[[], None]) -> None:
        self._client, self._changed = client, changed
        self._answers: dict[str, LeaderRefusal] = {}
        self._newest: dict[str, tuple[ScaleCall, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def answers(self) -> Mapping[str, LeaderRefusal]:
        """Refusals by operation."""
        return dict(self._answers)

    def send(self, call: ScaleCall, leader: LocalPod) -> None:
        """Sends the same call at most once in PAUSE seconds; the answer comes later."""
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
        try:
            await send_call(self._client, f"{LOCALHOST}:{leader.admin_port}", call, leader.launch.token, SECONDS)
        except AgentRefusal as refusal:
            self._answers[call.operation] = LeaderRefusal(refusal.code, refusal.message)
        except (NoAnswer, BadAnswer):
            return
        else:
            self._answers.pop(call.operation, None)
        self._changed()
