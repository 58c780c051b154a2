"""Tells the leaders of groups about operations, over their pods' admin endpoints. What becomes of one is heard by their reports."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout
from starling_agent.contract.config import ADMIN_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.scale import ScaleRequest

from starling_operator.agents.answers import PLAIN, BadAnswer, received
from starling_operator.logs import Key, about
from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.elastic.answers import refusal
from starling_operator.plan.observed import LeaderAnswer

SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Told:
    """The last call to one group's leader. `answer`: None if it took it, or did not answer."""

    call: ScaleCall
    answer: LeaderAnswer | None
    tries: int
    again_at: float

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.again_at - time.monotonic())


class Leaders:
    """`fence` raises when nothing may be changed, as for writes to the API server."""

    def __init__(self, fence: Callable[[], float]) -> None:
        self._fence = fence
        self._told: dict[Key, dict[str, _Told]] = {}
        self._session: ClientSession | None = None

    def answers(self, key: Key) -> Mapping[str, LeaderAnswer]:
        """Refusals by operation, of the newest call to each group."""
        told = self._told.get(key, {}).values()
        return {each.call.operation: each.answer for each in told if each.answer is not None}

    async def tell(self, key: Key, calls: Iterable[ScaleCall], token: str) -> float | None:
        """Seconds until the same should be told again; None: nothing is left to tell."""
        told, left = self._told.setdefault(key, {}), []
        for call in calls:
            last = told.get(call.group)
            same = last is not None and last.call == call
            if last is None or not same or last.seconds_left == 0.0:
                tries = last.tries + 1 if last is not None and same else 1
                answer = await self._send(key, call, token)
                news = answer is not None and (last is None or last.answer != answer)
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (tries - 1))
                last = told[call.group] = _Told(call, answer, tries, time.monotonic() + pause)
                left += [0.0] if news else []
            left.append(last.seconds_left)
        return min(left, default=None)

    def forget(self, key: Key) -> None:
        self._told.pop(key, None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _send(self, key: Key, call: ScaleCall, token: str) -> LeaderAnswer | None:
        """Its refusal; None when it takes it, or when nobody knows."""
        self._fence()
        url, headers = f"http://{authority(call.address, ADMIN_PORT)}/admin/scale", {"Authorization": f"Bearer {token}", **PLAIN}
        log.info("%s: %s", call.group, _described(call), extra=about(key))
        try:
            if call.data is None:
                asked = self._http().delete(url, params={"operation": call.operation}, headers=headers, allow_redirects=False)
            else:
                body = ScaleRequest(operation=call.operation, data=call.data).model_dump()
                asked = self._http().put(url, json=body, headers=headers, allow_redirects=False)
            async with asked as response:
                if response.status < 400:
                    return None
                text = await received(response.content.iter_any())
                return refusal(response.status, text.decode(errors="replace"))
        except (ClientError, TimeoutError, OSError, BadAnswer) as error:
            log.warning("%s: its leader did not answer, it is told again: %r", call.group, error, extra=about(key))
            return None

    def _http(self) -> ClientSession:
        if self._session is None:
            self._session = ClientSession(timeout=ClientTimeout(total=SECONDS), trust_env=False, auto_decompress=False)
        return self._session


def _described(call: ScaleCall) -> str:
    what = "cancels" if call.data is None else f"goes to {call.data} data parallel ranks by"
    return f"{what} operation {call.operation}"
