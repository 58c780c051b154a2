"""Rates as people write them: 10/s, 600/m, 100/30s."""

import re

PATTERN = r"^([1-9][0-9]{0,8})/([1-9][0-9]{0,8})?([smh])$"
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_rate(text: str) -> tuple[int, int]:
    """Returns (requests, seconds). Raises ValueError with what is possible."""
    match = re.fullmatch(PATTERN, text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no rate; write it like 10/s, 600/m or 100/30s")
    return int(match[1]), int(match[2] or 1) * _SECONDS[match[3]]
