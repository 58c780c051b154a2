"""Values that people write and read in their own way: sizes, rates and ages."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starling_agent.settings import RateLimit

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "ki": 2**10,
    "kib": 2**10,
    "mi": 2**20,
    "mib": 2**20,
    "gi": 2**30,
    "gib": 2**30,
    "ti": 2**40,
    "tib": 2**40,
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_RATE = re.compile(r"(\d+)/(\d+(?:\.\d+)?)?([smh])")


def parse_bytes(text: str) -> int:
    """4GiB, 512MiB, 1.5G or plain bytes. Raises ValueError with what is possible."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write it like 4GiB, 512MiB or 1000000")
    return int(float(match[1]) * factor)


def format_bytes(size: int) -> str:
    """1.50 GiB, 12.0 KiB, 300 B."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} B"


def parse_age(text: str) -> float:
    """7d, 12h, 30m, 2w or 90s, in seconds. Raises ValueError with what is possible."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no age; write it like 7d, 12h or 30m")
    return float(match[1]) * _AGES[match[2]]


def parse_rate(text: str) -> "RateLimit":
    """10/s, 600/m or 100/30s. Raises ValueError with what is possible."""
    from starling_agent.settings import RateLimit

    match = _RATE.fullmatch(text.strip())
    seconds = float(match[2] or 1) * _PERIODS[match[3]] if match else 0.0
    if match is None or int(match[1]) < 1 or seconds <= 0:
        raise ValueError(f"{text!r} is no rate; write it like 10/s, 600/m or 100/30s")
    return RateLimit(int(match[1]), seconds)
