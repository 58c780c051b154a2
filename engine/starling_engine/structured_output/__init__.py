"""A JSON schema that a caller sends becomes one that the grammar library enforces exactly, or is refused.

The library, llguidance, refuses keywords that it knows and lacks, but says nothing of those that it does not know.
`rewrite` removes what restricts nothing, says in other keywords what the library lacks, and refuses the rest with its path.
"""

from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.grammar import written_grammar
from starling_engine.structured_output.json_schema import rewrite

__all__ = ["json_grammar", "rewrite"]


def json_grammar(schema: Any, param: str | None = None) -> str:
    """Returns the library's grammar for JSON of a schema, as parsed from JSON.

    Raises `InvalidRequest` as `rewrite` does, and where no value is valid or the library finds the schema too large.
    """
    written = rewrite(schema, param)
    try:
        return written_grammar(written)
    except ValueError as error:
        raise InvalidRequest(f"$: {error}", param) from None
