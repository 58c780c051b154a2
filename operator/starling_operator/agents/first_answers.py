"""Lets a service's decision wait for pods that were never polled. No reconcile waits for them, so all services ask at once."""

import time
from collections.abc import Sequence
from typing import Any

from starling_operator.agents.polls import Polls
from starling_operator.logs import Key

START_SECONDS = 10.0
"""The first decision waits no longer: an operator that starts knows what pods report, and writes nothing where nothing changed."""
NEW_POD_SECONDS = 1.0
"""Later decisions wait no longer for pods that are new."""


class FirstAnswers:
    """Records since when each service's decision waits."""

    def __init__(self, polls: Sequence[Polls[Any, Any]]) -> None:
        self._polls = polls
        self._since: dict[Key, float] = {}
        self._decided: set[Key] = set()

    def seconds_left(self, key: Key) -> float:
        """Returns for how long the service's decision is to wait, unless the polls wake it before; 0: it may be made."""
        left = 0.0
        if all(polls.has_tried(key) for polls in self._polls):
            self._since.pop(key, None)
        else:  # a pod that swallows what it is sent is waited for once, not before each decision
            now, most = time.monotonic(), NEW_POD_SECONDS if key in self._decided else START_SECONDS
            left = max(0.0, most - (now - self._since.setdefault(key, now)))
        if not left:
            self._decided.add(key)
        return left

    def forget(self, key: Key) -> None:
        self._decided.discard(key)
        self._since.pop(key, None)
