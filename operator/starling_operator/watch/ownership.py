"""Fields that were applied once and are no longer wanted: the live object holds all that is wanted, and still has to be applied.

The API server keeps the fields of each manager in the object itself, so this is known after a restart of the operator too.
"""

import json
from typing import Any

from starling_operator.cluster.kinds import MANAGER
from starling_operator.plan.observed import Manifest
from starling_operator.watch.is_applied import digest


def own_fields(metadata: Manifest) -> str:
    """What we have applied, as JSON: it is large, and seldom looked at. "" for an object that was never applied."""
    for entry in metadata.get("managedFields", ()):
        if entry["manager"] == MANAGER and entry["operation"] == "Apply" and not entry.get("subresource"):
            return json.dumps(entry["fieldsV1"])
    return ""


def left_over(fields: dict[str, Any], wanted: Any) -> bool:
    """Whether `fields`, in the API server's form of field sets, names anything that `wanted` does not have."""
    return any(key != "." and _is_left_over(key, below, wanted) for key, below in fields.items())


def _is_left_over(key: str, below: dict[str, Any], wanted: Any) -> bool:
    sort, _, name = key.partition(":")
    if sort == "f":
        return not isinstance(wanted, dict) or name not in wanted or left_over(below, wanted[name])
    items = wanted if isinstance(wanted, list) else []
    if sort == "k":
        item = next((item for item in items if _has_keys(item, json.loads(name))), None)
        return item is None or left_over(below, item)
    if sort == "v":
        return json.loads(name) not in items
    return int(name) >= len(items)


def _has_keys(item: dict[str, Any], keys: dict[str, Any]) -> bool:
    """Keys that the item leaves out have the API's default, such as protocol TCP."""
    return all(item.get(name, value) == value for name, value in keys.items())


class Ownership:
    """Answers for each object once, until it or what is wanted of it changes."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[str, str, bool]] = {}

    def left_over(self, live: Manifest, wanted: Manifest) -> bool:
        uid, fields, form = live["metadata"]["uid"], live["metadata"].get("managedFields", ""), digest(wanted)
        known = self._answers.get(uid)
        if known is None or known[:2] != (fields, form):
            known = self._answers[uid] = (fields, form, bool(fields) and left_over(json.loads(fields), wanted))
        return known[2]

    def forget(self, uid: str) -> None:
        self._answers.pop(uid, None)
