"""Manifests from a few words: the smallest service that is right, and changes to it by dotted path."""

import copy
from typing import Any

from starling_crds.manifest import GROUP, KIND, VERSION


def service(changes: dict[str, Any] | None = None, name: str = "chat") -> dict[str, Any]:
    """`service({"engine.blockSize": 8})`; a change to None removes the field."""
    body: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"model": {"source": "hf://org/name"}},
    }
    for path, value in (changes or {}).items():
        _set(body["spec"], path.split("."), copy.deepcopy(value))
    return body


def _set(target: dict[str, Any], steps: list[str], value: Any) -> None:
    *above, last = steps
    for step in above:
        target = target.setdefault(step, {})
    if value is None:
        target.pop(last, None)
    else:
        target[last] = value
