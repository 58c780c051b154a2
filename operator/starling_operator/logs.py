"""JSON lines on standard error, by one formatter for kopf's records and ours. Each line names its object."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

Key = tuple[str, str]
"""Namespace and name of a service."""


class JsonLines(logging.Formatter):
    """Formats records. kopf marks its records with `k8s_ref`, as `about` does for ours."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        object_ref = getattr(record, "k8s_ref", None) or {}
        line.update({key: object_ref[key] for key in ("kind", "namespace", "name") if object_ref.get(key)})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def about(key: Key) -> dict[str, Any]:
    """Returns `extra` for a record about one service."""
    return {"k8s_ref": {"kind": "InferenceService", "namespace": key[0], "name": key[1]}}


def configure_logs(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # These libraries log a line for each event of each object and for each probe.
    logging.getLogger("kopf").setLevel(max(root.level, logging.WARNING))
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
