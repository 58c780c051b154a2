"""References from one written definition to another that no object and no array stands between."""

from collections.abc import Iterator
from typing import Any

from starling_engine.structured_output.keywords import Schema


def first_cycle(definitions: dict[str, Schema]) -> str | None:
    """Returns why definitions that lead back to themselves say nothing, or None if none does."""
    open_ends = {name: set(_in_place(schema)) for name, schema in definitions.items()}
    ready = [name for name, others in open_ends.items() if not others]
    users: dict[str, list[str]] = {}
    for name, others in open_ends.items():
        for other in others:
            users.setdefault(other, []).append(name)
    while ready:
        name = ready.pop()
        del open_ends[name]
        for user in users.get(name, []):
            open_ends[user].discard(name)
            if not open_ends[user]:
                ready.append(user)
    return "a $ref leads back to itself with no object and no array between" if open_ends else None


def _in_place(schema: Any) -> Iterator[str]:
    """Names of definitions that are used for the very value that the schema is for."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield schema["$ref"].removeprefix("#/$defs/")
    for part in [*schema.get("allOf", ()), *schema.get("anyOf", ())]:
        yield from _in_place(part)
