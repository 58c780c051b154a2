"""Times as Kubernetes writes them. There is no clock here: the time comes with what is seen."""

from datetime import UTC, datetime


def rfc3339(seconds: float) -> str:
    """Whole seconds in UTC, such as 2026-11-21T07:00:00Z."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
