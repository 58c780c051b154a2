"""Reads a checkpoint's JSON files with checks, so that errors name the bad field, and not a shape later on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from starling_engine.errors import ModelError, UnsupportedModel

LARGEST = int(1e30)
"""No field has a larger number: transformers writes "without end" so, which is a little more than 10**30.

Products and powers of such still are finite in float64.
"""


class Fields:
    """The fields of one JSON object; `source` ("config.json") and the field's name are in every error.

    A field that is null counts as absent, as transformers writes both. All readers raise ModelError. `written` are names in the
    file by ours, where they differ: errors name these.
    """

    def __init__(self, values: Mapping[str, Any], source: str, written: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.source = source
        self._written = written or {}

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Raises ModelError when the file is absent or holds no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path.parent} holds no {path.name}: not a model folder") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} must hold a JSON object, not a {type(values).__name__}")
        return cls(values, path.name)

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """Returns the fields with those of other names under ours, too: `names` are theirs by ours."""
        found = {name: theirs for name, theirs in names.items() if self.has(theirs) and not self.has(name)}
        ours = {name: self.values[theirs] for name, theirs in found.items()}
        return Fields({**self.values, **ours}, self.source, {**self._written, **found})

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """Returns the fields with values for those that are absent."""
        present = {name: self.values[name] for name in self.names()}
        return Fields({**defaults, **present}, self.source, self._written)

    def with_values(self, values: Mapping[str, Any]) -> "Fields":
        """Returns the fields with these in place of what they were."""
        return Fields({**self.values, **values}, self.source, self._written)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def written(self, name: str) -> str:
        """Returns the file's name of a field."""
        return self._written.get(name, name)

    def get(self, name: str) -> Any:
        """Returns the raw value; None when absent."""
        return self.values.get(name)

    def names(self) -> list[str]:
        return [name for name in self.values if self.has(name)]

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(name, f"must be an integer of at least {low}")
        if value > (most := LARGEST if high is None else high):
            raise self.error(name, f"must be at most {most}")
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0) -> float:
        value = self._value(name, default)
        if not is_number(value) or value < low:
            raise self.error(name, f"must be a number of at least {low:g}, and at most {LARGEST:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def only(self, name: str, value: bool, of: str = "") -> None:
        """Raises UnsupportedModel if a switch has another value than this one, its default. `of` says which models have it."""
        if self.boolean(name, value) != value:
            other, supported = (str(each).lower() for each in (not value, value))
            models = f" ({of})" if of else ""
            raise UnsupportedModel(f"{self.source}: {name}: {other}{models} is not supported; supported: {supported}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def one_of(self, name: str, *possible: str) -> str:
        """Returns a string; the default is the first possible one. Raises UnsupportedModel for any other."""
        value = self.text(name, possible[0])
        if value not in possible:
            raise UnsupportedModel(f"{self.source}: {name} {value!r} is not supported; supported: {', '.join(possible)}")
        return value

    def child(self, name: str) -> "Fields":
        """Returns the object under `name`; empty when absent."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(value, f"{self.source}: {name}")

    def texts(self, name: str) -> list[str]:
        """Returns a list of strings; empty when absent."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "must be a list of strings")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns a list of integers of at least 0; empty when absent."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in value):
            raise self.error(name, "must be a list of integers of at least 0")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of numbers above 0. Raises where it is absent or empty, too."""
        value = self.values.get(name)
        if not isinstance(value, list) or not value or not all(is_number(item) and item > 0 for item in value):
            raise self.error(name, "must be a list of numbers above 0")
        return tuple(float(item) for item in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns one id or a list of them; empty when absent."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise self.error(name, "must be a token id or a list of token ids")
        return tuple(ids)

    def error(self, name: str, rule: str) -> ModelError:
        if not self.has(name):
            return ModelError(f"{self.source}: {name} is missing; it {rule}")
        return ModelError(f"{self.source}: {self.written(name)} {rule}, got {self.values[name]!r}")

    def _value(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def is_number(value: object) -> TypeGuard[int | float]:
    """Says if a field's value is a number that may be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
