"""Takes secrets out of objects before they are written anywhere."""

import re
from typing import Any

LEFT_OUT = "(left out)"
_SECRET_NAME = re.compile(r"token|secret|password|passwd|credential|api_?key|private_?key|access_?key", re.IGNORECASE)
_DROPPED_METADATA = ("managedFields",)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation with a copy of the whole object as it was applied, also of a Secret's data."""


def redacted(value: Any) -> Any:
    """Returns a copy of an object without the data of Secrets and without environment values whose names sound secret."""
    if isinstance(value, list):
        return [redacted(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("kind") == "Secret":
        value = _secret_without_data(value)
    if "value" in value and _SECRET_NAME.search(str(value.get("name", ""))):
        value = {**value, "value": LEFT_OUT}
    return {key: redacted(item) for key, item in value.items() if key not in (*_DROPPED_METADATA, _LAST_APPLIED)}


def _secret_without_data(secret: dict[str, Any]) -> dict[str, Any]:
    """Returns the Secret with its keys, which help to understand it, but without their values."""
    kept = {key: value for key, value in secret.items() if key not in ("data", "stringData")}
    names = sorted({**(secret.get("data") or {}), **(secret.get("stringData") or {})})
    return {**kept, "data": dict.fromkeys(names, LEFT_OUT)}
