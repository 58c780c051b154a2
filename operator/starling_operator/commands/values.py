"""Values of flags that people write in their own way: rates. Sizes are the engine's own (`starling_engine.sizes`)."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starling_agent.settings import RateLimit

_PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_RATE = re.compile(r"(\d+)/(\d+(?:\.\d+)?)?([smh])")


def parse_rate(text: str) -> "RateLimit":
    """10/s, 600/m or 100/30s. Raises ValueError with what is possible."""
    from starling_agent.settings import RateLimit

    match = _RATE.fullmatch(text.strip())
    seconds = float(match[2] or 1) * _PERIODS[match[3]] if match else 0.0
    if match is None or int(match[1]) < 1 or seconds <= 0:
        raise ValueError(f"{text!r} is no rate; write it like 10/s, 600/m or 100/30s")
    return RateLimit(int(match[1]), seconds)
