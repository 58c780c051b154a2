"""A caller's schema as the library gets it."""

import json
from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.grammar import spelled
from starling_engine.structured_output.json_schema import rewrite


def enforced_schema(schema: Any, param: str | None, *, white_space: bool = True, path: str = "$") -> dict[str, Any]:
    """Returns what the library enforces: `rewrite`, and how JSON is written.

    Raises `InvalidRequest` as `rewrite` does, and where no value is valid or the library finds the schema too large. `path` is
    where the schema stands in the request's field.
    """
    try:
        return spelled(rewrite(schema, param), white_space=white_space)
    except InvalidRequest as error:
        raise InvalidRequest(path + error.message.removeprefix("$"), param) from None
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}", param) from None


def parsed(value: Any, param: str | None) -> Any:
    """Returns a value as it is, or parsed from JSON if it is a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except RecursionError:
        raise InvalidRequest("the text is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"the text is not JSON: {error}", param) from None
