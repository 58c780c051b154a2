"""Keeps what engine cores tell that they have cached.

A backend tells all at first, and then what changes (`GET /backend/cache`). When that ends, nothing is known until it is told anew:
a prefix may not be found for a while, and is never found wrongly.
"""

import itertools
from collections.abc import AsyncIterable

import msgspec
from starling_agent.client.bounded import BadAnswer, lines_of
from starling_engine.kv.changes import SNAPSHOTS, CacheChanges, CoreChanges

from starling_router.index import PrefixIndex, Snapshots

_decode = msgspec.json.Decoder(CoreChanges).decode


class CachedBlocks:
    """Blocks that engine cores have on their devices and in their CPU tiers, by numbers of cores."""

    def __init__(self) -> None:
        media = ("GPU", "CPU")
        self.indexes = tuple(PrefixIndex() for _ in media)
        """Blocks by medium."""
        self.snapshots = Snapshots(tuple(PrefixIndex() for _ in media))
        names = (*media, *(medium + SNAPSHOTS for medium in media))
        self._media = dict(zip(names, (*self.indexes, *self.snapshots.indexes), strict=True))
        self.backends: dict[int, int] = {}
        """Numbers of the backends of cores."""

    def add_core(self, backend: int) -> int:
        """Returns the number of a new core of a backend."""
        core = next(number for number in itertools.count() if number not in self.backends)
        self.backends[core] = backend
        return core

    def remove_core(self, core: int) -> None:
        self.forget(core)
        del self.backends[core]

    def apply(self, core: int, changes: CacheChanges) -> None:
        """Applies what a core tells. Media that are unknown here are left out."""
        if changes.anew:
            self.forget(core)
            self.snapshots.set(core, needed=changes.found_by != "blocks", alone=changes.found_by == "snapshots")
        if (index := self._media.get(changes.medium)) is not None:
            index.add(core, changes.stored)
            index.remove(core, changes.removed)

    def forget(self, core: int) -> None:
        for index in self._media.values():
            index.forget(core)
        self.snapshots.set(core, needed=False, alone=False)


class FollowedBackend:
    """Applies what one backend tells. Afterwards nothing of it is known."""

    def __init__(self, backend: int, cached: CachedBlocks) -> None:
        self._backend, self._cached = backend, cached
        self._cores: dict[int, int] = {}
        """Numbers of its cores, by those that it has for them."""

    @property
    def is_known(self) -> bool:
        """Says whether it has told all, as far as it has begun."""
        return bool(self._cores)

    async def follow(self, chunks: AsyncIterable[bytes]) -> None:
        """Applies all that comes. Raises BadAnswer for what cannot be read, and what `chunks` raise."""
        try:
            async for line in lines_of(chunks):
                self._apply(line)
        finally:
            for core in self._cores.values():
                self._cached.remove_core(core)
            self._cores.clear()

    def _apply(self, line: bytes) -> None:
        try:
            message = _decode(line)
        except msgspec.DecodeError as error:
            raise BadAnswer(f"what it has cached cannot be read: {error}"[:300]) from None
        if message.core not in self._cores:
            self._cores[message.core] = self._cached.add_core(self._backend)
        self._cached.apply(self._cores[message.core], message.changes)
