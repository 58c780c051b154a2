"""Times as Kubernetes writes them. The planner has no clock: the time is part of `Observed`."""

from datetime import UTC, datetime


def read_time(text: str) -> float:
    """Returns seconds since the epoch; 0 for ""."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def rfc3339(seconds: float) -> str:
    """Formats whole seconds in UTC, such as 2026-11-21T07:00:00Z."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
