"""What the API server refuses, so that the same thing is not sent again at every reconcile."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from starling_operator.logs import Key
from starling_operator.plan.observed import Manifest
from starling_operator.watch.is_applied import digest

FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0
_PASSING_TRIES = 3
"""An internal error that comes so often in a row is told: an admission webhook that is gone does not come back by itself."""


@dataclass(frozen=True, slots=True)
class WriteRefusal:
    """One object, refused `tries` times in a row in this very form. `passing`: it may not be the object's fault."""

    form: str
    message: str
    tries: int
    again_at: float
    passing: bool = False

    @property
    def is_told(self) -> bool:
        return not self.passing or self.tries >= _PASSING_TRIES

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.again_at - time.monotonic())


class WriteRefusals:
    """By service and object."""

    def __init__(self) -> None:
        self._known: dict[Key, dict[tuple[str, str], WriteRefusal]] = {}

    def standing(self, service: Key, manifest: Manifest) -> WriteRefusal | None:
        """A refusal that it is too early to try again."""
        known = self._known.get(service, {}).get(_key(manifest))
        if known is None or known.form != digest(manifest) or known.seconds_left == 0.0:
            return None
        return known

    def add(self, service: Key, manifest: Manifest, message: str, passing: bool = False) -> WriteRefusal:
        form, before = digest(manifest), self._known.get(service, {}).get(_key(manifest))
        tries = before.tries + 1 if before is not None and before.form == form else 1
        wait = min(MOST_SECONDS, FIRST_SECONDS * 2 ** (tries - 1))
        refusal = WriteRefusal(form, message, tries, time.monotonic() + wait, passing)
        self._known.setdefault(service, {})[_key(manifest)] = refusal
        return refusal

    def told(self, service: Key) -> frozenset[str]:
        """Names of the objects that are refused for what they are, or for long."""
        return frozenset(name for (_, name), refusal in self._known.get(service, {}).items() if refusal.is_told)

    def keep(self, service: Key, wanted: Iterable[Manifest]) -> None:
        """What is not wanted any more is not refused either."""
        known = self._known.get(service, {})
        for key in known.keys() - {_key(manifest) for manifest in wanted}:
            del known[key]

    def clear(self, service: Key, manifest: Manifest) -> None:
        self._known.get(service, {}).pop(_key(manifest), None)

    def forget(self, service: Key) -> None:
        self._known.pop(service, None)


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
