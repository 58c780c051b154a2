"""Refusals of the API server, so that the same object is not sent again at every reconcile."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from starling_operator.logs import Key
from starling_operator.plan.observed import Manifest
from starling_operator.watch.is_applied import digest

FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0
_TRANSIENT_TRIES = 3
"""Internal errors in a row after which one is reported: an admission webhook that is gone does not come back by itself."""


@dataclass(frozen=True, slots=True)
class WriteRefusal:
    """One object, refused `tries` times in a row with this manifest. `transient`: the cause may lie elsewhere."""

    manifest_digest: str
    message: str
    tries: int
    again_at: float
    transient: bool = False

    @property
    def is_reported(self) -> bool:
        return not self.transient or self.tries >= _TRANSIENT_TRIES

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.again_at - time.monotonic())


class WriteRefusals:
    """Refusals by service and object."""

    def __init__(self) -> None:
        self._known: dict[Key, dict[tuple[str, str], WriteRefusal]] = {}

    def in_backoff(self, service: Key, manifest: Manifest) -> WriteRefusal | None:
        """Returns the refusal of this very manifest while it is too early for another try; else None."""
        known = self._known.get(service, {}).get(_key(manifest))
        if known is None or known.manifest_digest != digest(manifest) or known.seconds_left == 0.0:
            return None
        return known

    def add(self, service: Key, manifest: Manifest, message: str, transient: bool = False) -> WriteRefusal:
        manifest_digest, before = digest(manifest), self._known.get(service, {}).get(_key(manifest))
        tries = before.tries + 1 if before is not None and before.manifest_digest == manifest_digest else 1
        wait = min(MOST_SECONDS, FIRST_SECONDS * 2 ** (tries - 1))
        refusal = WriteRefusal(manifest_digest, message, tries, time.monotonic() + wait, transient)
        self._known.setdefault(service, {})[_key(manifest)] = refusal
        return refusal

    def reported(self, service: Key) -> frozenset[str]:
        """Returns names of the objects that are refused for their content, or for long."""
        return frozenset(name for (_, name), refusal in self._known.get(service, {}).items() if refusal.is_reported)

    def retain(self, service: Key, wanted: Iterable[Manifest]) -> None:
        """Forgets refusals of objects that are no longer wanted."""
        known = self._known.get(service, {})
        for key in known.keys() - {_key(manifest) for manifest in wanted}:
            del known[key]

    def clear(self, service: Key, manifest: Manifest) -> None:
        self._known.get(service, {}).pop(_key(manifest), None)

    def forget(self, service: Key) -> None:
        self._known.pop(service, None)


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
