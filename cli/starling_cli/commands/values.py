"""Values in the form that people write and read: ages, rates and sizes. Sizes are parsed by `starling_engine.sizes`."""

import re
from typing import TYPE_CHECKING

from starling_crds import rate

if TYPE_CHECKING:
    from starling_agent.settings import RateLimit

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def format_bytes(size: int) -> str:
    """Returns a text like 1.50 GiB, 12.00 KiB or 300 B."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} B"


def parse_age(text: str) -> float:
    """Returns the seconds of 7d, 12h, 30m, 2w or 90s. Raises ValueError with what is possible."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no age; write it like 7d, 12h or 30m")
    return float(match[1]) * _AGES[match[2]]


def parse_rate(text: str) -> "RateLimit":
    """Parses 10/s, 600/m or 100/30s. Raises ValueError with what is possible."""
    from starling_agent.settings import RateLimit

    return RateLimit(*rate.parse_rate(text))
