"""Long polls of pods, one task for each: their newest reports by pod UID. A quiet pod costs one request every WAIT_SECONDS."""

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starling_agent.client.agent_client import AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer

from starling_operator.logs import Key, about

WAIT_SECONDS = 45.0
"""A report of a pod that answers becomes so old: each answer takes some 0.7 ms of a processor. With the grace it is below the 60 s
after which an agent is silent and a router is not believed. Agents and routers of any release hold a poll for 60 s at most."""
ANSWER_GRACE_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
MIN_POLL_SECONDS = 0.1
"""Seconds between two polls of one pod, also where it has news again and again."""
NO_NEWS_SECONDS = 1.0
"""Seconds between two polls of one that answers before it has news: a pod that ends does, so that no poll keeps it."""
log = logging.getLogger(__name__)
R = TypeVar("R")


class Target(Protocol):
    """A pod to poll. If it differs from the target before, it is polled anew at once."""

    @property
    def address(self) -> str: ...


T = TypeVar("T", bound=Target)


@dataclass(frozen=True, slots=True)
class Reply(Generic[R]):
    """The last report of one pod, and when it last answered. `error` says why its last answer is no report."""

    report: R | None
    at: float
    error: str = ""

    @property
    def age(self) -> float:
        return time.monotonic() - self.at


@dataclass(frozen=True, slots=True)
class _Poll(Generic[T]):
    """The task that polls one pod."""

    target: T
    task: asyncio.Task[None]


class Polls(ABC, Generic[T, R]):
    """Newest reports by pod UID. `wake` is called with the service when a report changed, or a pod's answer is none.

    It is called after a pod's first poll, too, whatever came of it: a decision may wait for that.
    """

    silence_is_news = True
    """True if `wake` is called, too, each time that a pod does not answer."""

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._replies: dict[str, Reply[R]] = {}
        self._polls: dict[Key, dict[str, _Poll[T]]] = {}
        self._known: dict[Key, set[str]] = {}
        self._untried: dict[Key, set[str]] = {}

    @abstractmethod
    async def _ask(self, target: T, known: R | None, wait: float) -> R:
        """Returns a report that is not `known`, or the same after `wait` seconds. Raises NoAnswer, AgentRefusal or BadAnswer."""

    @abstractmethod
    def _is_news(self, before: R | None, report: R) -> bool:
        """Says whether a decision may depend on what changed."""

    def reply(self, pod_uid: str) -> Reply[R] | None:
        return self._replies.get(pod_uid)

    def has_tried(self, key: Key) -> bool:
        """Returns whether each pod of the service that is polled has been polled once, answered or not."""
        return not self._untried.get(key)

    def forget(self, key: Key) -> None:
        """Ends the polls of a service that is gone."""
        for poll in self._polls.pop(key, {}).values():
            poll.task.cancel()
        self._untried.pop(key, None)
        for uid in self._known.pop(key, set()):
            self._replies.pop(uid, None)

    async def close(self) -> None:
        tasks = [poll.task for polls in self._polls.values() for poll in polls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_targets(self, key: Key, targets: Mapping[str, T], present: set[str]) -> None:
        """Polls these pods by UID. Reports stay of all that are `present`."""
        polls, untried = self._polls.setdefault(key, {}), self._untried.setdefault(key, set())
        for uid in [uid for uid, poll in polls.items() if targets.get(uid) != poll.target]:
            polls.pop(uid).task.cancel()
            untried.discard(uid)
        for uid, target in targets.items():
            if uid not in polls:
                if uid not in self._replies:
                    untried.add(uid)
                polls[uid] = _Poll(target, asyncio.create_task(self._run(key, uid, target), name=f"reports of {target.address}"))
        self._forget_gone(key, present)

    def _forget_gone(self, key: Key, present: set[str]) -> None:
        known = self._known.get(key, set())
        for uid in known - present:
            self._replies.pop(uid, None)
        self._known[key] = present

    async def _run(self, key: Key, uid: str, target: T) -> None:
        """Polls until it is cancelled. While a pod does not answer, its last report stays and grows old."""
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
                changed = self.silence_is_news
            else:
                failures = 0
            is_first = uid in (untried := self._untried[key])
            untried.discard(uid)
            if changed or is_first:
                self._wake(key)
            if failures:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            least = MIN_POLL_SECONDS if changed or failures else NO_NEWS_SECONDS
            await asyncio.sleep(max(0.0, began + least - time.monotonic()))

    def _reject(self, key: Key, uid: str, address: str, error: str) -> bool:
        """Drops the pod's last report, for its newest answer is none. Returns whether that is news."""
        before = self._replies.get(uid)
        self._replies[uid] = Reply(None, time.monotonic(), error)
        if before is not None and before.error == error:
            return False
        log.warning("%s: %s", address, error, extra=about(key))
        return True

    async def _poll(self, uid: str, target: T) -> bool:
        """Returns whether the report is news. Raises as `_ask` does."""
        reply = self._replies.get(uid)
        before = reply.report if reply is not None else None
        # A poll that takes the place of one that failed, or told the pod less, must not let the report grow older than others do.
        wait = WAIT_SECONDS if reply is None else max(0.0, WAIT_SECONDS - reply.age)
        report = await self._ask(target, before, wait)
        self._replies[uid] = Reply(report, time.monotonic())
        return self._is_news(before, report)
