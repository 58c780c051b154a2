"""Reports for tests."""

from typing import Any

from starling_agent.contract.report import Report


def starting_report(**fields: Any) -> Report:
    """Makes the report of an agent that starts."""
    settings: dict[str, Any] = {
        "version": 1,
        "incarnation": "i",
        "agent": "0",
        "config_hash": "h",
        "service": "s",
        "revision": "r",
        "group": "s-r-0",
        "node": 0,
        "pod": "s-r-0-0",
        "phase": "starting",
    }
    return Report(**{**settings, **fields})
