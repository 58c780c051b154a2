"""What others put into children that have to be exactly as they were made.

Server-side apply owns fields, not objects. A list without keys it replaces as a whole; but of a list with keys, such as a Service's
ports, it leaves items that somebody else added, and fields that we never set it does not know at all. Where those change what a
child does they are removed: another port leads to pods, another rule lets others in. Elsewhere, labels and annotations above all,
others may add what they like.
"""

from typing import Any

from starling_operator.plan.observed import Manifest
from starling_operator.watch.is_applied import is_applied

_EXACT_SPECS = ("NetworkPolicy",)
_EXACT_LISTS = {"Service": ("ports",)}


def is_exact(live: Manifest, wanted: Manifest) -> bool:
    """Nobody added anything where nothing may be added."""
    if wanted["kind"] in _EXACT_SPECS:
        return bool(live["spec"] == wanted["spec"])
    return not strays(live, wanted)


def strays(live: Manifest, wanted: Manifest) -> list[str]:
    """JSON pointers to what is left to remove once `wanted` is applied; the last of a list first, so that all of them stay true."""
    kind = wanted["kind"]
    fields = [f"/spec/{name}" for name in live["spec"] if name not in wanted["spec"]] if kind in _EXACT_SPECS else []
    lists = [(name, live["spec"].get(name, []), wanted["spec"][name]) for name in _EXACT_LISTS.get(kind, ())]
    return fields + [f"/spec/{name}/{index}" for name, items, wished in lists for index in _foreign(items, wished)]


def _foreign(items: list[Any], wished: list[Any]) -> list[int]:
    return [index for index in reversed(range(len(items))) if not any(is_applied(items[index], item) for item in wished)]
