"""Reports of routers, by one long poll for each, and the notice that each poll brings them."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starling_agent.client.agent_client import AgentClient
from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.router import router_token
from starling_agent.contract.router_report import RouterReport, ServiceNotice

from starling_operator.agents.polls import ANSWER_GRACE_SECONDS, Polls
from starling_operator.logs import Key
from starling_operator.plan.canary_notice import canary_notice
from starling_operator.plan.observed import Observed

NOTICE_SECONDS = 1.0
"""Seconds between two notices to one service's routers: each takes new polls, and a start has news many times a second."""


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """One router, and what it is told. The token opens no agent's admin endpoint."""

    address: str
    token: str
    notice: ServiceNotice


@dataclass(frozen=True, slots=True)
class _Given:
    """The last notice that a service's routers were told, and the time of it."""

    notice: ServiceNotice
    at: float


_NOTHING = _Given(ServiceNotice(), -math.inf)


class RouterReports(Polls[RouterTarget, RouterReport]):
    """Newest reports of routers. One that does not answer is no news: what it says may then only be too old to go by."""

    silence_is_news = False

    def __init__(self, wake: Callable[[Key], None], client: AgentClient) -> None:
        super().__init__(wake)
        self._client = client
        self._given: dict[Key, _Given] = {}

    def follow(self, key: Key, observed: Observed) -> None:
        """Polls the service's running routers, and tells them the last notice."""
        # An operator that starts must not end a canary by telling nothing of it.
        given = self._given.get(key)
        notice = given.notice if given else ServiceNotice(canary=canary_notice(observed, observed.service.status.canary))
        token = router_token(observed.token.encode()).decode()
        targets = {pod.uid: RouterTarget(pod.address, token, notice) for pod in observed.routers if pod.is_running}
        self._set_targets(key, targets, {pod.uid for pod in observed.routers})

    def notify(self, key: Key, observed: Observed, notice: ServiceNotice) -> float | None:
        """Gives the service's routers a notice. Returns the seconds until that may be done; None: they have it.

        What changes the requests' shares waits for nothing: a canary's pods would get requests before their share is known.
        """
        given, now = self._given.get(key, _NOTHING), time.monotonic()
        if given.notice == notice:
            return None
        if notice.canary == given.notice.canary and (left := given.at + NOTICE_SECONDS - now) > 0:
            return left
        self._given[key] = _Given(notice, now)
        self.follow(key, observed)
        return None

    def forget(self, key: Key) -> None:
        super().forget(key)
        self._given.pop(key, None)

    async def _ask(self, target: RouterTarget, known: RouterReport | None, wait: float) -> RouterReport:
        return await self._client.router_report(
            authority(target.address, ENDPOINT_PORT),
            target.token,
            target.notice,
            known=known,
            wait=wait,
            seconds=wait + ANSWER_GRACE_SECONDS,
        )

    def _is_news(self, before: RouterReport | None, report: RouterReport) -> bool:
        return before is None or (before.version, before.incarnation) != (report.version, report.incarnation)
