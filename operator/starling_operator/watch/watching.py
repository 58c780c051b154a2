"""Settings of kopf: it only watches, writes nothing to any object, and posts no events."""

import itertools
from collections.abc import Iterator
from typing import Any

import kopf

from starling_operator.cluster.kinds import WATCHED
from starling_operator.cluster.waiting import LONGEST_PAUSE


class NoProgress(kopf.ProgressStorage):
    """Stores nothing: `@kopf.on.event` handlers have no progress."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored."""

    def purge(self, **_: Any) -> None:
        """Nothing was stored."""

    def touch(self, **_: Any) -> None:
        """Objects are not touched."""

    def clear(self, *, essence: Any) -> Any:
        return essence


class NoDiffBase(kopf.DiffBaseStorage):
    """Stores no last-seen state, so kopf computes no diffs: its default storage copies every object on every event for them."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored."""


class Backoffs:
    """Seconds between retries of kopf's own requests. They never run out: an API server that is down comes back."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5, 8, 13), itertools.repeat(LONGEST_PAUSE))


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Makes kopf only watch. The API server filters by label; namespaces and CRDs are not watched, which would need RBAC rules."""
    settings.persistence.progress_storage = NoProgress()
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.chunk_size = 500
    settings.networking.error_backoffs = Backoffs()
    for kind in WATCHED:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
