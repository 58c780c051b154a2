"""Times as Kubernetes writes them. There is no clock here: the time comes with what is seen."""

from datetime import UTC, datetime


def read_time(text: str) -> float:
    """Seconds since the epoch of such a time; 0 for none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def rfc3339(seconds: float) -> str:
    """Whole seconds in UTC, such as 2026-11-21T07:00:00Z."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
