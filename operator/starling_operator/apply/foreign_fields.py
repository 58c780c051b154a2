"""Foreign fields of children that have to be exactly as they were made.

Server-side apply owns fields, not objects. It replaces a list without keys as a whole. Of a list with keys, such as a Service's
ports, it leaves items that somebody else added. It leaves all fields that we never set. Where those change what a child does
they are removed: another port leads to pods, another rule lets others in. Elsewhere, mainly in labels and annotations, others may
add what they like.
"""

from typing import Any

from starling_operator.plan.observed import Manifest
from starling_operator.watch.is_applied import is_applied

_EXACT_SPECS = ("NetworkPolicy",)
_EXACT_LISTS = {"Service": ("ports",)}


def lacks_foreign_fields(live: Manifest, wanted: Manifest) -> bool:
    """Returns whether nobody added anything where nothing may be added."""
    if wanted["kind"] in _EXACT_SPECS:
        return bool(live["spec"] == wanted["spec"])
    return not foreign_paths(live, wanted)


def foreign_paths(live: Manifest, wanted: Manifest) -> list[str]:
    """Returns JSON pointers to remove once `wanted` is applied, the last of a list first: the others then stay valid."""
    kind = wanted["kind"]
    fields = [f"/spec/{name}" for name in live["spec"] if name not in wanted["spec"]] if kind in _EXACT_SPECS else []
    lists = [(name, live["spec"].get(name, []), wanted["spec"][name]) for name in _EXACT_LISTS.get(kind, ())]
    return fields + [f"/spec/{name}/{index}" for name, items, wanted_items in lists for index in _foreign(items, wanted_items)]


def _foreign(items: list[Any], wanted_items: list[Any]) -> list[int]:
    return [index for index in reversed(range(len(items))) if not any(is_applied(items[index], item) for item in wanted_items)]
