"""Compares the cache with lists of the API server: at the start, to know when everything has been seen, and every minute.

A watch that starts again does not show what was deleted meanwhile, and a dead one shows nothing. Either way decisions would rest on
objects that are gone. Only metadata is listed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from starling_operator.cluster.kinds import Kind
from starling_operator.cluster.kube import METADATA_LIST, Kube, KubeError
from starling_operator.logs import Key
from starling_operator.watch.cache import Cache, version_of

PERIOD, FIRST_PERIOD = 60.0, 0.2
log = logging.getLogger(__name__)


class Audit:
    """Checks of the cache. `synced` is set once the watches have shown all that is listed; `behind` names a dead watch."""

    def __init__(self, cache: Cache, kinds: Sequence[Kind], scopes: Sequence[str | None], wake: Callable[[Key], None]) -> None:
        self._cache, self._wake = cache, wake
        self._lists = [(kind, scope) for kind in kinds for scope in scopes]
        self._unseen: dict[tuple[Kind, str | None], set[tuple[str, int]]] = {}
        self.synced = asyncio.Event()
        self.behind: str | None = None

    async def run(self, kube: Kube) -> None:
        """Runs until it is cancelled. At first it lists often, but only kinds of which objects are missing."""
        while not self.synced.is_set():
            missing = [each for each in self._lists if await self._check(kube, *each) != set()]
            if not missing:
                break
            await self._wait_for(missing)
        self.synced.set()
        while True:
            await asyncio.sleep(PERIOD)
            self.behind = None
            for each in self._lists:
                await self._check_watch(kube, *each)

    async def _wait_for(self, missing: Sequence[tuple[Kind, str | None]]) -> None:
        """Waits until the watches have caught up with the list, at most ten seconds."""
        end = time.monotonic() + 10.0
        while time.monotonic() < end:
            await asyncio.sleep(FIRST_PERIOD)
            if not any(self._still_unseen(each) for each in missing):
                return

    def _still_unseen(self, each: tuple[Kind, str | None]) -> bool:
        seen = self._cache.seen(*each)
        unseen = self._unseen.get(each, set())
        return any(seen.get(uid, -1) < version and not self._cache.is_gone(uid) for uid, version in unseen)

    async def _check_watch(self, kube: Kube, kind: Kind, scope: str | None) -> None:
        before = self._unseen.get((kind, scope), set())
        unseen = await self._check(kube, kind, scope)
        if unseen is not None and before & unseen:
            self.behind = f"the watch of {kind.plural} has shown nothing of {len(before & unseen)} changes for {PERIOD:.0f} s"
            log.error("%s", self.behind)

    async def _check(self, kube: Kube, kind: Kind, scope: str | None) -> set[tuple[str, int]] | None:
        """Returns UIDs and versions that only the list has. Drops objects that it no longer has.

        None: it cannot be listed. A watch can show nothing then either, so what it had yet to show counts no more.
        """
        try:
            listed, at = await self._list(kube, kind, scope)
        except KubeError as error:
            log.warning("%s cannot be listed: %s", kind.plural, error)
            await asyncio.sleep(1.0)
            self._unseen.pop((kind, scope), None)
            return None
        seen = self._cache.seen(kind, scope)
        for key in self._cache.drop_unlisted(kind, scope, listed, at):
            log.info("the watches missed that a %s was deleted", kind.name)
            self._wake(key)
        unseen = {(uid, version) for uid, version in listed.items() if seen.get(uid, -1) < version and not self._cache.is_gone(uid)}
        self._unseen[kind, scope] = unseen
        return unseen

    async def _list(self, kube: Kube, kind: Kind, scope: str | None) -> tuple[dict[str, int], int]:
        """Returns resourceVersions by UID, and the version of the whole list."""
        query = {"labelSelector": kind.selector} if kind.selector else {}
        answer = await kube.get(kind.path(scope), query, accept=METADATA_LIST)
        return {item["metadata"]["uid"]: version_of(item) for item in answer["items"] or ()}, version_of(answer)
