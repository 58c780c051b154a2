"""The agents' own reports: one long poll for each running pod. A quiet agent costs one request every WAIT seconds."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from starling_agent.contract.config import ADMIN_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.report import Report

from starling_operator.agents.answers import PLAIN, BadAnswer, read_report, received
from starling_operator.logs import Key, about
from starling_operator.plan.belief import TOKEN_REFUSED
from starling_operator.plan.deadline import deadlines
from starling_operator.plan.observed import Observed
from starling_operator.plan.pin import pin_of

WAIT = 30.0
"""Well below the 60 s after which an agent that does not answer counts as silent."""
GRACE = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
FIRST_ANSWER = 1.0
LEAST_PERIOD = 0.1
"""An agent that answers before there is news, again and again, costs no more than this."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentReply:
    """The last report of one agent, and when it last answered at all. `error`: why its last answer is none."""

    report: Report | None
    at: float
    error: str = ""

    @property
    def age(self) -> float:
        return time.monotonic() - self.at


@dataclass(frozen=True, slots=True)
class _Poll:
    """One task asks one address with one token, and tells one commit and one end. `tried`: it has had an answer, or none."""

    address: str
    token: str
    commit: str | None
    ends_at: float | None
    task: asyncio.Task[None]
    tried: asyncio.Event


class AgentReports:
    """`wake` is called with the service when a report changed, or an agent stopped answering."""

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._heard: dict[str, AgentReply] = {}
        self._polls: dict[Key, dict[str, _Poll]] = {}
        self._known: dict[Key, set[str]] = {}
        self._session: ClientSession | None = None

    def of(self, pod_uid: str) -> AgentReply | None:
        return self._heard.get(pod_uid)

    def follow(self, key: Key, observed: Observed) -> None:
        """From now on asks the service's pods, and no others: the token is for those of its own StatefulSets, until they end."""
        children, pods, ends = observed.children, observed.pods, deadlines(observed)
        sets = {live["metadata"]["uid"] for (kind, _), live in children.items() if kind == "StatefulSet"}
        commits = {pod.uid: pin_of(key[1], pod.revision, children) for pod in pods}
        polls = self._polls.setdefault(key, {})
        ours = [pod for pod in pods if pod.owner in sets or pod.uid in polls]
        wanted = {pod.uid: pod.address for pod in ours if pod.phase == "Running" and pod.address}
        current = {uid: (address, observed.token, commits[uid], ends.get(uid)) for uid, address in wanted.items()}
        for uid in [
            uid for uid, poll in polls.items() if current.get(uid) != (poll.address, poll.token, poll.commit, poll.ends_at)
        ]:
            polls.pop(uid).task.cancel()
        for uid, address in wanted.items():
            if uid not in polls:
                tried = asyncio.Event()
                if uid in self._heard:
                    tried.set()
                task = asyncio.create_task(self._ask(key, uid, *current[uid], tried), name=f"reports of {address}")
                polls[uid] = _Poll(*current[uid], task, tried)
        self._forget_gone(key, {pod.uid for pod in pods})

    async def first_answers(self, key: Key) -> None:
        """Waits a moment for agents that were never asked: an operator that starts knows them before it judges them."""
        untried = [poll.tried.wait() for poll in self._polls[key].values() if not poll.tried.is_set()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER):
                await asyncio.gather(*untried)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        for poll in self._polls.pop(key, {}).values():
            poll.task.cancel()
        for uid in self._known.pop(key, set()):
            self._heard.pop(uid, None)

    async def close(self) -> None:
        tasks = [poll.task for polls in self._polls.values() for poll in polls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _forget_gone(self, key: Key, present: set[str]) -> None:
        known = self._known.get(key, set())
        for uid in known - present:
            self._heard.pop(uid, None)
        self._known[key] = present

    async def _ask(
        self, key: Key, uid: str, address: str, token: str, commit: str | None, ends_at: float | None, tried: asyncio.Event
    ) -> None:
        """Never ends by itself. While an agent does not answer its last report is kept, and grows old."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                changed = await self._ask_once(uid, address, token, _told(commit, ends_at))
            except BadAnswer as error:
                failures += 1
                changed = self._refuse(key, uid, address, str(error))
            except (ClientError, TimeoutError, OSError, ValueError) as error:
                failures += 1
                log.debug("%s does not answer: %r", address, error, extra=about(key))
                changed = True
            else:
                failures = 0
            tried.set()
            if changed:
                self._wake(key)
            if failures:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            await asyncio.sleep(max(0.0, began + LEAST_PERIOD - time.monotonic()))

    def _refuse(self, key: Key, uid: str, address: str, error: str) -> bool:
        """Nothing that the agent said before is believed any more. Whether that is news."""
        before = self._heard.get(uid)
        self._heard[uid] = AgentReply(None, time.monotonic(), error)
        if before is not None and before.error == error:
            return False
        log.warning("%s: %s", address, error, extra=about(key))
        return True

    async def _ask_once(self, uid: str, address: str, token: str, told: Mapping[str, str]) -> bool:
        """Whether the report is another one than before. Raises what says that there was no report."""
        heard = self._heard.get(uid)
        before = heard.report if heard is not None else None
        query = {"wait": f"{WAIT:.0f}", "after": "0", **told}
        if before is not None:
            query |= {"after": str(before.version), "incarnation": before.incarnation}
        url, headers = f"http://{authority(address, ADMIN_PORT)}/admin/report", {"Authorization": f"Bearer {token}", **PLAIN}
        # A redirection could lead to whatever the operator reaches and the pod does not.
        async with self._http().get(url, params=query, headers=headers, allow_redirects=False) as response:
            if response.status == 401:
                raise BadAnswer(TOKEN_REFUSED)
            response.raise_for_status()
            report = read_report(await received(response.content.iter_any()))
        self._heard[uid] = AgentReply(report, time.monotonic())
        return before != report

    def _http(self) -> ClientSession:
        """Without a limit of connections: each pod holds one, nearly always."""
        if self._session is None:
            timeout = ClientTimeout(total=WAIT + GRACE, connect=GRACE)
            self._session = ClientSession(connector=TCPConnector(limit=0), timeout=timeout, trust_env=False, auto_decompress=False)
        return self._session


def _told(commit: str | None, ends_at: float | None) -> dict[str, str]:
    """What the operator says with its question."""
    ends_in = None if ends_at is None else f"{ends_at - time.time():.1f}"
    return {name: value for name, value in (("commit", commit), ("ends_in", ends_in)) if value is not None}
