"""A form that a caller wants becomes a grammar that the library enforces exactly, or is refused.

The library, llguidance, refuses keywords that it knows and lacks, but says nothing of those that it does not know.
`rewrite` removes what restricts nothing, says in other keywords what the library lacks, and refuses the rest with its path.
"""

from typing import Any

from starling_engine.structured_output.enforced_schema import enforced_schema
from starling_engine.structured_output.grammar import grammar_text
from starling_engine.structured_output.json_schema import rewrite

__all__ = ["json_grammar", "rewrite"]


def json_grammar(schema: Any, param: str | None = None) -> str:
    """Returns the library's grammar for JSON of a schema, as parsed from JSON. Raises as `enforced_schema` does."""
    return grammar_text({"json_schema": enforced_schema(schema, param)})
