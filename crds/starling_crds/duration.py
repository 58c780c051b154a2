"""Durations as the Gateway API writes them (GEP-2257): 30s, 1h30m, 500ms."""

import re

PATTERN = "^([0-9]{1,5}(h|m|s|ms)){1,4}$"
_MILLISECONDS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}


def milliseconds(text: str) -> int:
    """Returns the length of a text that matches PATTERN."""
    return sum(int(count) * _MILLISECONDS[unit] for count, unit in re.findall("([0-9]+)(ms|[hms])", text))
