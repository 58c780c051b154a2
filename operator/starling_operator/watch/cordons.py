"""Nodes that take no new pods: who empties a node cordons it first, as `kubectl drain` does, and groups on it may be preceded.

They are listed on a clock. The API server picks them, so that the answer is nearly always empty, and the many changes of a node
cost nothing. Where nodes may not be listed (an installation for some namespaces) nobody knows them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from starling_operator.cluster.kinds import NODE
from starling_operator.cluster.kube import Kube, KubeError

PERIOD, REFUSED_PERIOD = 2.0, 60.0
log = logging.getLogger(__name__)


class Cordons:
    """`wake` is called with the names of nodes that were cordoned, or are no longer."""

    def __init__(self, kube: Kube, wake: Callable[[Iterable[str]], None]) -> None:
        self._kube, self._wake = kube, wake
        self.names: frozenset[str] | None = None
        """None: nobody knows."""

    async def run(self) -> None:
        """Never ends by itself."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD if self.names is not None else REFUSED_PERIOD)

    async def look(self) -> None:
        """What cannot be asked now stays as it was."""
        try:
            answer = await self._kube.get(NODE.path(None), {"fieldSelector": "spec.unschedulable=true", "resourceVersion": "0"})
        except KubeError as error:
            if error.status == 403:
                log.info("nodes may not be listed here, so that groups are not preceded when a node is emptied")
                self.names = None
            else:
                log.warning("cordoned nodes cannot be listed: %s", error)
            return
        before, self.names = self.names, frozenset(item["metadata"]["name"] for item in answer["items"] or ())
        self._wake(self.names ^ (before or frozenset()))
