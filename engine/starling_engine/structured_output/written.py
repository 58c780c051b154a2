"""One schema while it is written: its keywords, and schemas that have to hold besides, in the order of the caller."""

from typing import Any

from starling_engine.structured_output.keywords import Schema


class Written:
    """Properties come in the order in which they are read, so what the caller wrote first stays first."""

    def __init__(self, types: list[str] | None) -> None:
        """`types` are given to all keywords: without them the library compiles these for all six."""
        named: Any = types[0] if types and len(types) == 1 else types
        self._typed: dict[str, Any] = {} if types is None else {"type": named}
        self._parts: list[Schema] = []
        self._keywords: dict[str, Any] | None = None
        """The last part while it is one of keywords, to which others can be added."""
        self._has_keywords = False

    def put(self, keyword: str, value: Any) -> None:
        """Adds a keyword, to those before unless one of them is the same."""
        if self._keywords is None or keyword in self._keywords:
            self._keywords = dict(self._typed)
            self._parts.append(self._keywords)
            self._has_keywords = True
        self._keywords[keyword] = value

    def also(self, schema: Schema) -> None:
        """Adds a schema that has to hold as well."""
        if schema not in (True, {}):
            self._parts.append(schema)
            self._keywords = None

    def schema(self) -> Schema:
        """Returns all of it."""
        if False in self._parts:
            return False
        parts = self._parts if self._has_keywords or not self._typed else [self._typed, *self._parts]
        return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True
