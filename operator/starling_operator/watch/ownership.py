"""Fields that were applied once and are no longer wanted. Such an object has all that is wanted, and still has to be applied.

The API server stores each manager's fields in the object itself, so they are known after a restart of the operator too.
"""

import json
from typing import Any

from starling_operator.cluster.kinds import MANAGER
from starling_operator.plan.observed import Manifest
from starling_operator.watch.is_applied import digest


def applied_fields(metadata: Manifest) -> str:
    """Returns the fields that we have applied as JSON text, for they are large and rarely read; "" where nothing was applied."""
    for entry in metadata.get("managedFields", ()):
        if entry["manager"] == MANAGER and entry["operation"] == "Apply" and not entry.get("subresource"):
            return json.dumps(entry["fieldsV1"])
    return ""


def has_leftover_fields(fields: dict[str, Any], wanted: Any) -> bool:
    """Returns whether `fields`, in the API server's form of field sets, has any that `wanted` lacks."""
    return any(key != "." and _is_left_over(key, below, wanted) for key, below in fields.items())


def _is_left_over(key: str, below: dict[str, Any], wanted: Any) -> bool:
    sort, _, name = key.partition(":")
    if sort == "f":
        return not isinstance(wanted, dict) or name not in wanted or has_leftover_fields(below, wanted[name])
    items = wanted if isinstance(wanted, list) else []
    if sort == "k":
        item = next((item for item in items if _has_keys(item, json.loads(name))), None)
        return item is None or has_leftover_fields(below, item)
    if sort == "v":
        return json.loads(name) not in items
    return int(name) >= len(items)


def _has_keys(item: dict[str, Any], keys: dict[str, Any]) -> bool:
    """Returns whether the item has these keys; one that it leaves out has the API's default, such as protocol TCP."""
    return all(item.get(name, value) == value for name, value in keys.items())


class Ownership:
    """Caches `has_leftover_fields` by object, until the object or its manifest changes."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[str, str, bool]] = {}

    def has_leftover_fields(self, live: Manifest, wanted: Manifest) -> bool:
        uid, fields, form = live["metadata"]["uid"], live["metadata"].get("managedFields", ""), digest(wanted)
        known = self._answers.get(uid)
        if known is None or known[:2] != (fields, form):
            known = self._answers[uid] = (fields, form, bool(fields) and has_leftover_fields(json.loads(fields), wanted))
        return known[2]

    def forget(self, uid: str) -> None:
        self._answers.pop(uid, None)
