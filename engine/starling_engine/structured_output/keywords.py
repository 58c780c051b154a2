"""Keywords of a schema: which restrict nothing, and which values the others have.

The vocabularies are those of JSON Schema 2020-12, with older drafts' and OpenAPI's words for the same.
https://json-schema.org/draft/2020-12/json-schema-validation
"""

from typing import Any

Schema = dict[str, Any] | bool
"""A JSON schema as parsed: an object, or true (anything) or false (nothing)."""

TYPES = ("null", "boolean", "number", "string", "array", "object")
"""Types of which each value has exactly one. An integer is a number."""

ANNOTATIONS = frozenset(
    (
        # Said to people.
        *("$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        # Said to editors.
        *("markdownDescription", "enumDescriptions", "markdownEnumDescriptions", "deprecationMessage"),
        # Said to OpenAPI's generators.
        *("externalDocs", "xml"),
        # Said of a string's content, which no validator decodes.
        *("contentMediaType", "contentEncoding", "contentSchema"),
        # Names of schemas: references have been followed where they are rewritten.
        *("$schema", "$id", "$anchor", "$dynamicAnchor", "$defs", "definitions"),
        # Read together with the keyword that they qualify; alone they mean nothing.
        *("then", "else", "minContains", "maxContains", "additionalItems"),
    )
)
"""Keywords that restrict nothing, and are removed. So is all that begins with x-."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = (
    *("additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
NUMBERS = ("minimum", "maximum", "multipleOf")
EXCLUSIVE_BOUNDS = ("exclusiveMinimum", "exclusiveMaximum")
STRINGS = ("pattern", "format", "$ref")
FLAGS = ("uniqueItems", "nullable")


def is_annotation(keyword: str) -> bool:
    """Returns whether a keyword restricts nothing where it stands among the keywords of a schema."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")


def named_types(schema: dict[str, Any]) -> list[str]:
    """Returns what the keyword `type` lists, as a list; all types without it."""
    named = schema.get("type", list(TYPES))
    return named if isinstance(named, list) else [named]


def fault_of(keyword: str, value: Any) -> str | None:
    """Returns which kind of value the keyword has to have, if it has another one."""
    wanted, is_right = _SHAPES.get(keyword, ("", _anything))
    return None if is_right(value) else f"has to be {wanted}"


def _anything(_: Any) -> bool:
    return True


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_list_of_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_map_of_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def is_number(value: Any) -> bool:
    """Returns whether a value is a number of JSON; Python's booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_items(value: Any) -> bool:
    return _is_schema(value) or (isinstance(value, list) and all(map(_is_schema, value)))


def _is_map_of_dependencies(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_schema(part) or _is_list_of_strings(part) for part in value.values())


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value) and value <= 2**31


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_map_of_lists(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_list_of_strings, value.values()))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and (name in TYPES or name == "integer") for name in names)


_SHAPES = {
    **dict.fromkeys(SCHEMAS, ("a schema: an object, true or false", _is_schema)),
    **dict.fromkeys(LISTS_OF_SCHEMAS, ("a list of schemas, and not empty", _is_list_of_schemas)),
    **dict.fromkeys(MAPS_OF_SCHEMAS, ("an object of schemas", _is_map_of_schemas)),
    **dict.fromkeys(COUNTS, ("a whole number from 0 to 2147483648", _is_count)),
    **dict.fromkeys(NUMBERS, ("a number", is_number)),
    **dict.fromkeys(STRINGS, ("a string", _is_string)),
    **dict.fromkeys(FLAGS, ("true or false", _is_flag)),
    **dict.fromkeys(EXCLUSIVE_BOUNDS, ("a number", _is_bound)),
    "items": ("a schema", _is_items),
    "dependencies": ("an object of schemas and lists of strings", _is_map_of_dependencies),
    "required": ("a list of strings", _is_list_of_strings),
    "dependentRequired": ("an object of lists of strings", _is_map_of_lists),
    "enum": ("a list of values, and not empty", _is_list),
    "type": ("null, boolean, integer, number, string, array, object, or a list of these", _is_type),
}
