"""Errors of Kubernetes when it creates a group's pods: a quota or an admission webhook refuses them, as only events show.

The events of a StatefulSet are read only while pods have been missing for longer than it takes to create them.
"""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starling_operator.cluster.kinds import EVENT
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.logs import Key, about
from starling_operator.plan import labels
from starling_operator.plan.group import missing_pods
from starling_operator.plan.observed import Manifest, Observed

MISSING_SECONDS, READ_PERIOD = 3.0, 8.0
_REFUSED, _MADE = "FailedCreate", "SuccessfulCreate"
_BEFORE_CAUSE = "failed error: "
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _MissingPods:
    """Pods that one StatefulSet lacks. Times are of the monotonic clock."""

    group: str
    since: float
    read_at: float = -math.inf
    message: str = ""


class PodCreationErrors:
    """Records since when pods are missing, by service and the StatefulSet's UID."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[Key, dict[str, _MissingPods]] = {}

    async def refresh(self, key: Key, observed: Observed) -> None:
        known, current = self._known.pop(key, {}), {}
        for live in _group_sets(observed):
            name, uid = live["metadata"]["name"], live["metadata"]["uid"]
            missing = missing_pods(name, int(live["spec"].get("replicas", 1)), observed.pods)
            if missing:
                current[uid] = known.get(uid) or _MissingPods(name, time.monotonic())
                await self._read_events(key, uid, missing, current[uid])
        if current:
            self._known[key] = current

    def messages(self, key: Key) -> dict[str, str]:
        """Returns, by group, Kubernetes' message about the pods that it does not create."""
        return {each.group: each.message for each in self._known.get(key, {}).values() if each.message}

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def _read_events(self, key: Key, uid: str, missing: Sequence[str], record: _MissingPods) -> None:
        now = time.monotonic()
        if now - record.since < MISSING_SECONDS or now - record.read_at < READ_PERIOD:
            return
        record.read_at = now
        try:
            answer = await self._kube.get(EVENT.path(key[0]), {"fieldSelector": f"regarding.uid={uid}"})
        except KubeError as error:
            # Events only explain: no decision depends on them.
            log.warning("why pods are missing cannot be read: %s", error, extra=about(key))
            return
        record.message = refusal_of(answer["items"] or (), missing)


def refusal_of(events: Iterable[Manifest], missing: Iterable[str]) -> str:
    """Returns the last message about the first of these pods that was refused; "" if none was."""
    relevant = [event for event in events if event.get("reason") in (_REFUSED, _MADE)]
    for pod in missing:
        its = [event for event in relevant if f"Pod {pod} " in event.get("note", "")]
        last = max(its, key=lambda event: (_time(event), event["reason"] == _REFUSED), default=None)
        if last is not None and last["reason"] == _REFUSED:
            note = str(last["note"])
            return note.partition(_BEFORE_CAUSE)[2] or note
    return ""


def _time(event: Manifest) -> str:
    """Returns the time of the event's last occurrence; times in UTC sort as texts."""
    series = event.get("series") or {}
    last = series.get("lastObservedTime") or event.get("deprecatedLastTimestamp") or event.get("eventTime")
    return str(last or event["metadata"]["creationTimestamp"])


def _group_sets(observed: Observed) -> list[Manifest]:
    return [
        live
        for (kind, _), live in sorted(observed.children.items())
        if kind == "StatefulSet" and labels.GROUP in live["metadata"].get("labels", {})
    ]
