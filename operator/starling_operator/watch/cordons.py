"""Cordoned cluster nodes, which take no new pods. A node is cordoned before it is drained; groups on it may be replaced early.

They are listed periodically. The API server selects them, so the answer is nearly always empty, and a node's many changes cost
nothing. Where nodes may not be listed (an installation for some namespaces) they are unknown.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from starling_operator.cluster.kinds import NODE
from starling_operator.cluster.kube import Kube, KubeError

PERIOD, REFUSED_PERIOD = 2.0, 60.0
log = logging.getLogger(__name__)


class Cordons:
    """Names of cordoned nodes. `wake` is called with those that were cordoned, or are no longer."""

    def __init__(self, kube: Kube, wake: Callable[[Iterable[str]], None]) -> None:
        self._kube, self._wake = kube, wake
        self.names: frozenset[str] | None = None
        """Names; None while they are unknown."""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(PERIOD if self.names is not None else REFUSED_PERIOD)

    async def refresh(self) -> None:
        """Lists the nodes. When the list fails the names stay as they were."""
        try:
            answer = await self._kube.get(NODE.path(None), {"fieldSelector": "spec.unschedulable=true", "resourceVersion": "0"})
        except KubeError as error:
            if error.status == 403:
                log.info("nodes may not be listed here: no group is created ahead of a node's drain")
                self.names = None
            else:
                log.warning("cordoned nodes cannot be listed: %s", error)
            return
        before, self.names = self.names, frozenset(item["metadata"]["name"] for item in answer["items"] or ())
        self._wake(self.names ^ (before or frozenset()))
