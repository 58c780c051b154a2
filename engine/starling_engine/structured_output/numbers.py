"""Numbers that the library gets exactly right, and the others, which are refused.

The library reads bounds as 64-bit floats and writes expressions of digits from them. That is exact below 2**53.
"""

from decimal import Decimal
from math import floor, prod
from typing import Any

from starling_engine.structured_output.keywords import Schema, is_number
from starling_engine.structured_output.patterns import is_writable

LARGEST = 2**53
"""Integers up to here are exact as 64-bit floats, but one more than it is not."""
_LARGEST_COEFFICIENT = 2**32 - 1
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def fault_of_value(value: Any) -> str | None:
    """Returns why a value of `const` or `enum` cannot be enforced exactly, or None if it can."""
    if isinstance(value, list | dict):
        parts = value.values() if isinstance(value, dict) else value
        return next((fault for part in parts if (fault := fault_of_value(part))), None)
    if isinstance(value, str) and not is_writable(value):
        return f"the string {value[:100]!r} has a control character that is not written"
    is_inexact = isinstance(value, int) and abs(value) > LARGEST
    return f"the integer {value} is beyond {LARGEST}, up to which integers are exact" if is_inexact else None


def fault_of_bound(bound: float) -> str | None:
    """Returns why a bound cannot be enforced exactly, or None if it can."""
    return f"the bound {bound} is not below {LARGEST}, and so not exact" if abs(bound) >= LARGEST else None


def fault_of_interval(numbers: dict[str, Any]) -> str | None:
    """Returns why bounds together cannot be enforced on numbers that need not be integers, or None if they can.

    The library takes the whole number itself for part of an interval that begins just above it and ends before the next.
    """
    lows = [(numbers[word], word.startswith("exclusive")) for word in BOUNDS[:2] if word in numbers]
    highs = [(numbers[word], word.startswith("exclusive")) for word in BOUNDS[2:] if word in numbers]
    if not lows or not highs:
        return None
    low, is_open_below = max(lows)
    high, high_exclusive = min(highs, key=lambda high: (high[0], not high[1]))
    is_wrong = _begins_at_an_open_integer(low, is_open_below, high) or _begins_at_an_open_integer(-high, high_exclusive, -low)
    reason = f"numbers between {low} and {high} without the whole number itself are not possible"
    return f"{reason}; allow it, or the next whole number" if is_wrong else None


def _begins_at_an_open_integer(start: float, is_open: bool, end: float) -> bool:
    return is_open and start >= 0 and start == floor(start) == floor(end)


def fault_of_multiple(multiple: float) -> str | None:
    """Returns why a `multipleOf` cannot be enforced exactly, or None if it can."""
    if multiple <= 0:
        return "multipleOf has to be greater than 0"
    scaled = scaled_multiple(multiple)
    exact = scaled is not None and Decimal(scaled[0]).scaleb(-scaled[1]) == Decimal(repr(multiple))
    return None if exact else f"multiples of {multiple} are not possible; only those of decimals with few digits are"


def scaled_multiple(multiple: float) -> tuple[int, int] | None:
    """Returns the coefficient and the decimals that the library finds by multiplying with 10, or None if they are too many."""
    scaled, decimals = float(multiple), 0
    while not scaled.is_integer():
        scaled, decimals = scaled * 10, decimals + 1
    return (int(scaled), decimals) if scaled <= _LARGEST_COEFFICIENT else None


def is_whole(schema: dict[str, Any]) -> bool:
    """Returns whether numbers that the schema accepts are integers."""
    named = schema.get("type", "number")
    return "number" not in (named if isinstance(named, list) else [named])


def bounds_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema's bounds on numbers."""
    return {word: schema[word] for word in BOUNDS if word in schema and is_number(schema[word])}


class Intersections:
    """Bounds and steps of all schemas of a document: `allOf`, `anyOf` and `$ref` may make several hold for one number."""

    def __init__(self) -> None:
        self._intersects = False
        self._intervals: list[dict[str, Any]] = []
        self._multiples: set[float] = set()

    def note_schema(self, schema: Schema) -> None:
        """Notes whether a schema, as written, makes others hold for one value."""
        if isinstance(schema, dict):
            beside = len(schema.keys() - {"type"}) > 1
            self._intersects |= len(schema.get("allOf", ())) > 1 or "patternProperties" in schema
            self._intersects |= beside and not {"allOf", "anyOf", "$ref"}.isdisjoint(schema)

    def note_numbers(self, schema: dict[str, Any]) -> None:
        """Notes the bounds and the step of a schema of numbers."""
        if not is_whole(schema):
            self._intervals.append(bounds_of(schema))
        if "multipleOf" in schema:
            self._multiples.add(schema["multipleOf"])

    def fault(self) -> str | None:
        """Returns why some of them may not be exact together, or None."""
        if not self._intersects:
            return None
        if self._common_multiple_overflows():
            return "multipleOf with so many digits, in schemas that allOf, anyOf or $ref may join, is not possible"
        if self._begins_at_an_open_integer():
            return "exclusive bounds beside fractions, in schemas that allOf, anyOf or $ref may join, are not possible"
        return None

    def _begins_at_an_open_integer(self) -> bool:
        floors_of_highs = {floor(high) for word in BOUNDS[2:] for high in self._bounds(word) if high != floor(high)}
        floors_of_lows = {floor(-low) for word in BOUNDS[:2] for low in self._bounds(word) if low != floor(low)}
        above = {low for low in self._bounds("exclusiveMinimum") if low >= 0}
        below = {-high for high in self._bounds("exclusiveMaximum") if high <= 0}
        return bool(above & floors_of_highs or below & floors_of_lows)

    def _bounds(self, word: str) -> set[float]:
        return {interval[word] for interval in self._intervals if word in interval}

    def _common_multiple_overflows(self) -> bool:
        """Looks for a least common multiple that, times another number, may exceed the library's 32 bits."""
        scaled = [found for multiple in self._multiples if (found := scaled_multiple(multiple))]
        if len(scaled) < 2:
            return False
        most = max(decimals for _, decimals in scaled)
        coefficients = [coefficient * 10 ** (most - decimals) for coefficient, decimals in scaled]
        return bool(prod(coefficients) * max(coefficients) > _LARGEST_COEFFICIENT)
