"""The query of a long poll."""

import math

from starlette.datastructures import QueryParams

from starling_agent.http.errors import ApiError


def poll_query(query: QueryParams) -> tuple[int, float]:
    """Returns the version that the caller knows, and the seconds that it waits for another. Raises ApiError 400."""
    return int(number(query, "after", "-1")), number(query, "wait", "0")


def number(query: QueryParams, name: str, default: str = "") -> float:
    """Returns one parameter's value. Raises ApiError 400 if it is no finite number."""
    text = query.get(name, default)
    try:
        value = int(text) if name == "after" else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ApiError(400, f"{name} must be a number, got {text[:100]!r}", param=name, code="invalid_value")
    return value
