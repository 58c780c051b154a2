"""One schema while it is written: its keywords, and schemas that have to hold besides, in the order of the caller."""

from typing import Any

from starling_engine.structured_output.keywords import Schema


class Written:
    """Properties come in the order in which they are read, so what the caller wrote first stays first."""

    def __init__(self) -> None:
        self._parts: list[Schema] = []
        self._is_open = False
        """Whether the last part is one of keywords, to which others can be added."""

    def put(self, keyword: str, value: Any) -> None:
        """Adds a keyword, to those before unless one of them is the same."""
        last = self._parts[-1] if self._parts else None
        if not self._is_open or not isinstance(last, dict) or keyword in last:
            last = {}
            self._parts.append(last)
            self._is_open = True
        last[keyword] = value

    def also(self, schema: Schema) -> None:
        """Adds a schema that has to hold as well."""
        if schema in (True, {}):
            return
        self._parts.append(schema)
        self._is_open = False

    def schema(self, types: list[str] | None) -> Schema:
        """Returns all of it. Each part is given the types, because without them it would be compiled for all six."""
        if False in self._parts:
            return False
        named: Any = types[0] if types and len(types) == 1 else types
        typed = self._parts if types is None else [{"type": named}, *self._parts]
        merged = _merged(typed)
        return merged[0] if len(merged) == 1 else {"allOf": merged} if merged else True


def _merged(parts: list[Schema]) -> list[Schema]:
    """The types alone are no part: they are added to each that has none."""
    if len(parts) > 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type"}:
        return [{**parts[0], **part} if isinstance(part, dict) and "type" not in part else part for part in parts[1:]]
    return parts
