"""Sends operations to the leaders of groups, over their pods' admin endpoints. Their reports show what becomes of one."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.config import ADMIN_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.scale import ScaleRequest

from starling_operator.logs import Key, about
from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.observed import LeaderRefusal

SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sent:
    """The last call to one group's leader. `answer`: its refusal; None if it accepted the call, or did not answer."""

    call: ScaleCall
    answer: LeaderRefusal | None
    tries: int
    again_at: float

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.again_at - time.monotonic())


class Leaders:
    """Remembers the newest call to each group. `fence` raises when nothing may be changed, as for writes to the API server."""

    def __init__(self, fence: Callable[[], float], client: AgentClient) -> None:
        self._fence = fence
        self._client = client
        self._sent: dict[Key, dict[str, _Sent]] = {}

    def answers(self, key: Key) -> Mapping[str, LeaderRefusal]:
        """Returns refusals by operation, of the newest call to each group."""
        sent = self._sent.get(key, {}).values()
        return {each.call.operation: each.answer for each in sent if each.answer is not None}

    async def send(self, key: Key, calls: Iterable[ScaleCall], token: str) -> float | None:
        """Sends what is new or due again. Returns the seconds until the same is due again; None: nothing is left to send."""
        sent, left = self._sent.setdefault(key, {}), []
        for call in calls:
            last = sent.get(call.group)
            same = last is not None and last.call == call
            if last is None or not same or last.seconds_left == 0.0:
                tries = last.tries + 1 if last is not None and same else 1
                answer = await self._send_one(key, call, token)
                news = answer is not None and (last is None or last.answer != answer)
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (tries - 1))
                last = sent[call.group] = _Sent(call, answer, tries, time.monotonic() + pause)
                left += [0.0] if news else []
            left.append(last.seconds_left)
        return min(left, default=None)

    def forget(self, key: Key) -> None:
        self._sent.pop(key, None)

    async def _send_one(self, key: Key, call: ScaleCall, token: str) -> LeaderRefusal | None:
        """Returns the leader's refusal; None when it accepts the call, or when no answer came."""
        self._fence()
        log.info("%s: %s", call.group, _described(call), extra=about(key))
        try:
            await send_call(self._client, authority(call.address, ADMIN_PORT), call, token, SECONDS)
        except AgentRefusal as refusal:
            return LeaderRefusal(refusal.code, refusal.message)
        except (NoAnswer, BadAnswer) as error:
            log.warning("%s: its leader did not answer, the call is sent again: %r", call.group, error, extra=about(key))
        return None


async def send_call(client: AgentClient, address: str, call: ScaleCall, token: str, seconds: float) -> None:
    """Raises AgentRefusal, NoAnswer or BadAnswer."""
    if call.data is None:
        await client.cancel(address, token, call.operation, seconds=seconds)
    else:
        await client.scale(address, token, ScaleRequest(operation=call.operation, data=call.data), seconds=seconds)


def _described(call: ScaleCall) -> str:
    what = "cancels" if call.data is None else f"goes to {call.data} data parallel ranks by"
    return f"{what} operation {call.operation}"
