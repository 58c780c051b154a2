"""Comparison of live objects with manifests: an object that already is as wanted need not be applied."""

import hashlib
import json
from typing import Any

from starling_operator.plan.observed import Manifest

# Metadata of a live object that changes although nobody changed what was applied.
_SERVER_METADATA = ("resourceVersion", "generation", "managedFields", "creationTimestamp")


# Maps that the API server replaces as a whole: one key more selects other pods.
_ATOMIC_MAPS = ("selector", "podSelector", "namespaceSelector", "matchLabels")


def is_applied(live: Any, wanted: Any) -> bool:
    """Returns whether `live` has every field of `wanted`. Lists must be equally long and in order, selectors have no more keys."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(_holds_key(live, key, value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and len(live) == len(wanted) and all(map(is_applied, live, wanted))
    return bool(live == wanted)


def _holds_key(live: dict[str, Any], key: str, value: Any) -> bool:
    # The API server does not store a field that is null.
    if value is None:
        return True
    return key in live and is_applied(live[key], value) and (key not in _ATOMIC_MAPS or len(live[key]) == len(value))


class AppliedObjects:
    """Remembers objects that differ from what was applied only because the API server writes it in its own way ("1000m" is "1").

    Without this such an object would be applied again at every reconcile.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}

    def remember(self, live: Manifest, wanted: Manifest) -> None:
        self._known[live["metadata"]["uid"]] = (digest(wanted), _without_server_metadata(live))

    def knows(self, live: Manifest, wanted: Manifest) -> bool:
        known = self._known.get(live["metadata"]["uid"])
        return known is not None and known == (digest(wanted), _without_server_metadata(live))

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _without_server_metadata(live: Manifest) -> str:
    metadata = {key: value for key, value in live["metadata"].items() if key not in _SERVER_METADATA}
    return digest({**{key: value for key, value in live.items() if key != "status"}, "metadata": metadata})
