"""Reports of agents, by one long poll for each running pod. A quiet agent costs one request every WAIT_SECONDS seconds."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.config import ADMIN_PORT
from starling_agent.contract.listening import authority
from starling_agent.contract.report import Report

from starling_operator.logs import Key, about
from starling_operator.plan.drain_deadlines import drain_deadlines
from starling_operator.plan.observed import Observed
from starling_operator.plan.pinned_commit import pinned_commit
from starling_operator.plan.pod_report import TOKEN_REFUSED

WAIT_SECONDS = 30.0
"""Well below the 60 s after which an agent that does not answer counts as silent."""
ANSWER_GRACE_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
FIRST_ANSWER_SECONDS = 1.0
MIN_POLL_SECONDS = 0.1
"""Seconds between two polls of one agent, also where it answers again and again before there is news."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentReply:
    """The last report of one agent, and when it last answered. `error` says why its last answer is no report."""

    report: Report | None
    at: float
    error: str = ""

    @property
    def age(self) -> float:
        return time.monotonic() - self.at


@dataclass(frozen=True, slots=True)
class _Target:
    """One agent, and what each poll notifies it of: the commit to load, and when its pod has to have ended."""

    address: str
    token: str
    commit: str | None
    ends_at: float | None


@dataclass(frozen=True, slots=True)
class _Poll:
    """The task that polls one agent. `tried` is set after the first poll, answered or not."""

    target: _Target
    task: asyncio.Task[None]
    tried: asyncio.Event


class AgentReports:
    """Newest reports by pod UID. `wake` is called with the service when a report changed, or an agent stopped answering."""

    def __init__(self, wake: Callable[[Key], None], client: AgentClient) -> None:
        self._wake = wake
        self._client = client
        self._replies: dict[str, AgentReply] = {}
        self._polls: dict[Key, dict[str, _Poll]] = {}
        self._known: dict[Key, set[str]] = {}

    def reply(self, pod_uid: str) -> AgentReply | None:
        return self._replies.get(pod_uid)

    def follow(self, key: Key, observed: Observed) -> None:
        """Polls the service's running pods and no others: the token is for pods of its own StatefulSets, until they end."""
        polls, targets = self._polls.setdefault(key, {}), self._targets(key, observed)
        for uid in [uid for uid, poll in polls.items() if targets.get(uid) != poll.target]:
            polls.pop(uid).task.cancel()
        for uid, target in targets.items():
            if uid not in polls:
                tried = asyncio.Event()
                if uid in self._replies:
                    tried.set()
                task = asyncio.create_task(self._run(key, uid, target, tried), name=f"reports of {target.address}")
                polls[uid] = _Poll(target, task, tried)
        self._forget_gone(key, {pod.uid for pod in observed.pods})

    async def first_answers(self, key: Key) -> None:
        """Waits a moment for agents that were never polled: an operator that starts knows their reports before it decides."""
        untried = [poll.tried.wait() for poll in self._polls[key].values() if not poll.tried.is_set()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                await asyncio.gather(*untried)

    def forget(self, key: Key) -> None:
        """Ends the polls of a service that is gone."""
        for poll in self._polls.pop(key, {}).values():
            poll.task.cancel()
        for uid in self._known.pop(key, set()):
            self._replies.pop(uid, None)

    async def close(self) -> None:
        tasks = [poll.task for polls in self._polls.values() for poll in polls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _targets(self, key: Key, observed: Observed) -> dict[str, _Target]:
        """Returns whom to poll, by pod UID."""
        children, pods, ends = observed.children, observed.pods, drain_deadlines(observed)
        sets = {live["metadata"]["uid"] for (kind, _), live in children.items() if kind == "StatefulSet"}
        polled = self._polls.get(key, {})
        return {
            pod.uid: _Target(pod.address, observed.token, pinned_commit(key[1], pod.revision, children), ends.get(pod.uid))
            for pod in pods
            if pod.phase == "Running" and pod.address and (pod.owner in sets or pod.uid in polled)
        }

    def _forget_gone(self, key: Key, present: set[str]) -> None:
        known = self._known.get(key, set())
        for uid in known - present:
            self._replies.pop(uid, None)
        self._known[key] = present

    async def _run(self, key: Key, uid: str, target: _Target, tried: asyncio.Event) -> None:
        """Polls until it is cancelled. While an agent does not answer, its last report stays and grows old."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                changed = await self._poll(uid, target)
            except BadAnswer as error:
                failures += 1
                changed = self._reject(key, uid, target.address, str(error))
            except (NoAnswer, AgentRefusal) as error:
                failures += 1
                log.debug("%s does not answer: %r", target.address, error, extra=about(key))
                changed = True
            else:
                failures = 0
            tried.set()
            if changed:
                self._wake(key)
            if failures:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            await asyncio.sleep(max(0.0, began + MIN_POLL_SECONDS - time.monotonic()))

    def _reject(self, key: Key, uid: str, address: str, error: str) -> bool:
        """Drops the agent's last report, for its newest answer is none. Returns whether that is news."""
        before = self._replies.get(uid)
        self._replies[uid] = AgentReply(None, time.monotonic(), error)
        if before is not None and before.error == error:
            return False
        log.warning("%s: %s", address, error, extra=about(key))
        return True

    async def _poll(self, uid: str, target: _Target) -> bool:
        """Returns whether the report differs from the one before. Raises NoAnswer, AgentRefusal or BadAnswer."""
        reply = self._replies.get(uid)
        before = reply.report if reply is not None else None
        try:
            report = await self._client.report(
                authority(target.address, ADMIN_PORT),
                target.token,
                known=before,
                wait=WAIT_SECONDS,
                commit=target.commit,
                ends_in=None if target.ends_at is None else target.ends_at - time.time(),
                seconds=WAIT_SECONDS + ANSWER_GRACE_SECONDS,
            )
        except AgentRefusal as refusal:
            if refusal.status == 401:
                raise BadAnswer(TOKEN_REFUSED) from refusal
            raise
        self._replies[uid] = AgentReply(report, time.monotonic())
        return before != report
