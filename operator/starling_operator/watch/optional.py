"""ServiceMonitor, HTTPRoute and InferencePool: their CRDs are installed and removed while the operator runs.

They are listed periodically, for a watch could not outlive its kind. A CRD that comes or goes, and a drift, is seen within PERIOD
seconds.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from starling_operator.cluster.kinds import OPTIONAL, SERVICE_MONITOR, Kind
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.logs import Key
from starling_operator.plan.observed import Settings
from starling_operator.watch.cache import Cache, version_of

PERIOD = 20.0
log = logging.getLogger(__name__)


class OptionalKinds:
    """Optional kinds that the cluster has now; their objects are in the cache."""

    def __init__(self, kube: Kube, cache: Cache, scopes: Sequence[str | None], wake: Callable[[Key], None]) -> None:
        self._kube, self._cache, self._scopes, self._wake = kube, cache, scopes, wake
        self._present: set[Kind] = set()
        self._unlisted = set(OPTIONAL)
        self._problems: dict[Kind, str] = {}
        """The reason for which a kind could not be listed the last time."""

    def adapt(self, settings: Settings) -> Settings:
        """Returns the settings for this cluster."""
        return replace(settings, service_monitors=SERVICE_MONITOR in self._present)

    @property
    def unlisted(self) -> frozenset[str]:
        """Names of kinds of which nobody knows yet what the cluster has."""
        return frozenset(kind.name for kind in self._unlisted)

    async def run(self) -> None:
        """Goes on after a first `refresh`, until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.refresh()

    async def refresh(self) -> None:
        """Lists all optional kinds. One that cannot be listed stays as it was."""
        for kind in OPTIONAL:
            try:
                await self._refresh_kind(kind)
            except KubeError as error:
                if error.status == 403:
                    self._on_known(kind)  # As far as this operator may see, there are none.
                if self._problems.get(kind) != str(error):
                    log.warning("%s cannot be listed: %s", kind.plural, error)
                self._problems[kind] = str(error)
            else:
                self._problems.pop(kind, None)

    async def has(self, kind: Kind) -> bool:
        """Returns whether the cluster has the kind at this moment, optional or not. Raises KubeError."""
        if kind in OPTIONAL:
            await self._refresh_kind(kind)
        return kind not in OPTIONAL or kind in self._present

    async def _refresh_kind(self, kind: Kind) -> None:
        try:
            for scope in self._scopes:
                await self._list(kind, scope)
        except KubeError as error:
            if error.status != 404:
                raise
            self._on_removed(kind)
        else:
            self._on_installed(kind)
        self._on_known(kind)

    async def _list(self, kind: Kind, scope: str | None) -> None:
        answer = await self._kube.get(kind.path(scope), {"labelSelector": kind.selector})
        listed, at = {item["metadata"]["uid"] for item in answer["items"]}, version_of(answer)
        news = [self._cache.put(kind, item) for item in answer["items"]]
        for key in (*filter(None, news), *self._cache.drop_unlisted(kind, scope, listed, at)):
            self._wake(key)

    def _on_installed(self, kind: Kind) -> None:
        if kind not in self._present:
            log.info("the cluster has %s", kind.plural)
            self._present.add(kind)
            self._wake_all()

    def _on_removed(self, kind: Kind) -> None:
        """Drops the kind's objects, which are gone with it."""
        for uid in self._cache.seen(kind, None):
            self._cache.drop(uid)
        if kind in self._present:
            log.info("the cluster no longer has %s", kind.plural)
            self._present.discard(kind)
            self._wake_all()

    def _on_known(self, kind: Kind) -> None:
        if kind in self._unlisted:
            self._unlisted.discard(kind)
            self._wake_all()

    def _wake_all(self) -> None:
        for key in self._cache.all_services():
            self._wake(key)
