"""Why a group's pods are not made: a quota or an admission webhook refuses them, and only their StatefulSet's events say so.

Asked for only while pods have been missing for longer than it takes to make them.
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

PATIENCE, ASK_AGAIN = 3.0, 8.0
_REFUSED, _MADE = "FailedCreate", "SuccessfulCreate"
_BEFORE_WORDS = "failed error: "
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Absence:
    """Of one StatefulSet's pods. Times are of the monotonic clock."""

    group: str
    since: float
    asked_at: float = -math.inf
    words: str = ""


class PodCreationErrors:
    """Remembers since when pods are missing, by service and the StatefulSet's UID."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[Key, dict[str, _Absence]] = {}

    async def look(self, key: Key, observed: Observed) -> None:
        known, current = self._known.pop(key, {}), {}
        for live in _group_sets(observed):
            name, uid = live["metadata"]["name"], live["metadata"]["uid"]
            missing = missing_pods(name, int(live["spec"].get("replicas", 1)), observed.pods)
            if missing:
                current[uid] = known.get(uid) or _Absence(name, time.monotonic())
                await self._look_at(key, uid, missing, current[uid])
        if current:
            self._known[key] = current

    def words(self, key: Key) -> dict[str, str]:
        """By group, Kubernetes' words about the pods that it does not make."""
        return {absence.group: absence.words for absence in self._known.get(key, {}).values() if absence.words}

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def _look_at(self, key: Key, uid: str, missing: Sequence[str], absence: _Absence) -> None:
        now = time.monotonic()
        if now - absence.since < PATIENCE or now - absence.asked_at < ASK_AGAIN:
            return
        absence.asked_at = now
        try:
            answer = await self._kube.get(EVENT.path(key[0]), {"fieldSelector": f"regarding.uid={uid}"})
        except KubeError as error:
            # They only explain: nothing that has to be done depends on them.
            log.warning("why pods are missing cannot be read: %s", error, extra=about(key))
            return
        absence.words = refusal_of(answer["items"] or (), missing)


def refusal_of(events: Iterable[Manifest], missing: Iterable[str]) -> str:
    """What was said last about the first of these pods that was refused; "" if none was."""
    told = [event for event in events if event.get("reason") in (_REFUSED, _MADE)]
    for pod in missing:
        its = [event for event in told if f"Pod {pod} " in event.get("note", "")]
        last = max(its, key=lambda event: (_time(event), event["reason"] == _REFUSED), default=None)
        if last is not None and last["reason"] == _REFUSED:
            note = str(last["note"])
            return note.partition(_BEFORE_WORDS)[2] or note
    return ""


def _time(event: Manifest) -> str:
    """Of its last occurrence; times in UTC sort as texts."""
    series = event.get("series") or {}
    last = series.get("lastObservedTime") or event.get("deprecatedLastTimestamp") or event.get("eventTime")
    return str(last or event["metadata"]["creationTimestamp"])


def _group_sets(observed: Observed) -> list[Manifest]:
    return [
        live
        for (kind, _), live in sorted(observed.children.items())
        if kind == "StatefulSet" and labels.GROUP in live["metadata"].get("labels", {})
    ]
