"""A schema of which the grammar library enforces all, made of one that a caller sends; or the reason why there is none.

Three things happen to a keyword: it is written as it is, said in other keywords, or refused with its path.
`docs/structured-output.md` has the table.
"""

import json
from collections.abc import Callable
from typing import Any

from starling_engine.structured_output import arrays, numbers, objects
from starling_engine.structured_output.complement import NoComplement, complement
from starling_engine.structured_output.cycles import first_cycle
from starling_engine.structured_output.disjoint import are_disjoint
from starling_engine.structured_output.document import SchemaDocument
from starling_engine.structured_output.formats import POSSIBLE, as_keywords
from starling_engine.structured_output.grammar import are_exclusive
from starling_engine.structured_output.keywords import Schema, is_annotation, named_types
from starling_engine.structured_output.patterns import UnsupportedPattern, translate
from starling_engine.structured_output.written import Written

MAX_OVERLAPPING = 5
"""Branches of a `oneOf` that may overlap: each is written once with all others negated."""
MAX_PATTERNS = 16
"""Patterns of one `patternProperties`."""
MAX_WRITTEN = 1_000_000
"""Characters of the schema that is written."""

Write = Callable[[dict[str, Any], Written, Any], None]
"""Writes keywords of a schema. The last argument is the part of the document that it was made of, for errors."""


def rewrite(schema: Any, param: str | None = None) -> dict[str, Any]:
    """Returns a schema for the same values, in which the library enforces every keyword.

    A few valid values are lost, and none is won: `docs/structured-output.md` lists which.

    Args:
        schema: as parsed from JSON; neither it nor its parts are changed.
        param: the request's field that holds it, for the error.

    Raises:
        InvalidRequest: what is not possible, with its path and what is possible instead.
    """
    return _Rewriter(SchemaDocument(schema, param)).document()


class _Rewriter:
    """Writes one document: its root, then each schema that is referred to, once."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._numbers = numbers.Intersections()
        self._writes: dict[str, Write] = {
            **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), self._write_counts),
            **dict.fromkeys((*numbers.BOUNDS, "multipleOf"), self._write_numbers),
            **dict.fromkeys(("items", "prefixItems"), self._write_items),
            **dict.fromkeys(objects.KEYWORDS, self._write_properties),
            **dict.fromkeys(("const", "enum"), self._write_values),
            "type": self._write_nothing,
            "pattern": self._write_pattern,
            "format": self._write_format,
            "$ref": self._write_reference,
            "allOf": self._write_all_of,
            "anyOf": self._write_any_of,
            "oneOf": self._write_one_of,
            "not": self._write_not,
            "if": self._write_condition,
            "dependentRequired": self._write_dependencies,
            "dependentSchemas": self._write_dependencies,
            "contains": self._write_contains,
            "uniqueItems": self._write_unique,
            "discriminator": self._write_discriminator,
        }

    def document(self) -> dict[str, Any]:
        """Returns the whole document as written."""
        source = self._document.root
        root = self.schema(source, source)
        definitions: dict[str, Schema] = {}
        while self._waiting:
            name, target = self._waiting.pop()
            definitions[name] = self.schema(target, target)
        if root is False:
            raise self._document.refusal(source, None, "no value is valid for this schema")
        if fault := self._numbers.fault() or first_cycle(definitions):
            raise self._document.refusal(source, None, fault)
        written = {**(root if isinstance(root, dict) else {}), **({"$defs": definitions} if definitions else {})}
        if len(json.dumps(written)) > MAX_WRITTEN:
            raise self._document.refusal(source, None, f"the schema needs more than {MAX_WRITTEN} characters to be rewritten")
        return written

    def schema(self, source: Schema, origin: Any) -> Schema:
        """Returns a schema as written. `origin` is the part of the document that `source` was made of, for errors."""
        self._document.spend()
        if isinstance(source, bool):
            return source
        origin = source if self._document.contains(source) else origin
        source = self._named_properties(self._document.modern(source), origin)
        written = Written(named_types(source) if "type" in source else None)
        done: set[Write] = set()
        for keyword in source:
            if is_annotation(keyword):
                continue
            write = self._writes.get(keyword)
            if write is None:
                reason = f"the keyword {keyword} is not known, or cannot be enforced; without it the schema is taken"
                raise self._document.refusal(origin, keyword, reason)
            if write not in done:
                done.add(write)
                write(source, written, origin)
        schema = written.schema()
        self._numbers.note_schema(schema)
        return schema

    def _named_properties(self, source: dict[str, Any], origin: Any) -> dict[str, Any]:
        """The schema without keywords that have to be merged with its properties, before these are written."""
        if "unevaluatedProperties" in source:
            source = objects.with_evaluated_properties(source, self._document, origin)
        if "propertyNames" in source:
            source = objects.with_named_properties(source, self._document, origin)
        if "unevaluatedItems" in source:
            source = arrays.with_evaluated_items(source, self._document, origin)
        self._document.place(source, origin)
        return source

    def _write_nothing(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        """The type is added to each part at the end."""

    def _write_counts(self, source: dict[str, Any], written: Written, _: Any) -> None:
        for word in ("minLength", "maxLength", "minItems", "maxItems"):
            if word in source:
                written.put(word, int(source[word]))

    def _write_values(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        for word, values in (("const", [source.get("const")]), ("enum", source.get("enum", []))):
            if word in source:
                self._document.spend(len(values) // 10)
                if fault := numbers.fault_of_value(values):
                    raise self._document.refusal(origin, word, fault)
                written.put(word, source[word])

    def _write_numbers(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        for word in numbers.BOUNDS:
            if word in source and (fault := numbers.fault_of_bound(source[word])):
                raise self._document.refusal(origin, word, fault)
        if "multipleOf" in source and (fault := numbers.fault_of_multiple(source["multipleOf"])):
            raise self._document.refusal(origin, "multipleOf", fault)
        if not numbers.is_whole(source) and (fault := numbers.fault_of_interval(numbers.bounds_of(source))):
            raise self._document.refusal(origin, next(word for word in numbers.BOUNDS[1::2] if word in source), fault)
        self._numbers.note_numbers(source)
        for word in (*numbers.BOUNDS, "multipleOf"):
            if word in source:
                written.put(word, source[word])

    def _write_pattern(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        written.put("pattern", self._translated(source["pattern"], origin, "pattern"))

    def _write_format(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        said = as_keywords(source["format"])
        if said is None:
            reason = f"the format {source['format']} is not possible; {', '.join(POSSIBLE)} are"
            raise self._document.refusal(origin, "format", reason)
        if "format" in said:
            written.put("format", said["format"])
        else:
            written.also(self.schema(said, origin))

    def _translated(self, pattern: str, origin: Any, keyword: str) -> str:
        try:
            return translate(pattern)
        except UnsupportedPattern as error:
            raise self._document.refusal(origin, keyword, f"the pattern {pattern[:100]!r} {error}") from None

    def _write_items(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        if "prefixItems" in source:
            written.put("prefixItems", [self.schema(part, origin) for part in source["prefixItems"]])
        if "items" in source:
            written.put("items", self.schema(source["items"], origin))

    def _write_properties(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        source, besides = objects.PropertyCounts(source, self._document, origin).said_otherwise()
        if "properties" in source:
            written.put("properties", {name: self.schema(part, origin) for name, part in source["properties"].items()})
        if "patternProperties" in source:
            written.put("patternProperties", self._by_pattern(source["patternProperties"], origin))
        if "additionalProperties" in source:
            written.put("additionalProperties", self.schema(source["additionalProperties"], origin))
        for word in ("required", "minProperties", "maxProperties"):
            if word in source:
                written.put(word, list(dict.fromkeys(source[word])) if word == "required" else int(source[word]))
        for schema in besides:
            written.also(self.schema(schema, origin))

    def _by_pattern(self, parts: dict[str, Schema], origin: Any) -> dict[str, Schema]:
        if len(parts) > MAX_PATTERNS:
            reason = f"patternProperties is possible for {MAX_PATTERNS} patterns at most"
            raise self._document.refusal(origin, "patternProperties", reason)
        # Each is compared with each.
        self._document.spend(10 * len(parts) ** 2)
        found: dict[str, Schema] = {}
        for pattern, part in parts.items():
            translated = self._translated(pattern, origin, "patternProperties")
            found[translated] = self.schema(part, origin)
        if not are_exclusive(list(found)):
            reason = "patternProperties is possible for patterns of which no name can match two; write them so, or one pattern"
            raise self._document.refusal(origin, "patternProperties", reason)
        return found

    def _write_reference(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        target = self._document.resolve(source["$ref"], origin)
        if isinstance(target, bool):
            written.also(target)
            return
        if id(target) not in self._names:
            self._names[id(target)] = str(len(self._names))
            self._waiting.append((self._names[id(target)], target))
        written.put("$ref", f"#/$defs/{self._names[id(target)]}")

    def _write_all_of(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        for part in source["allOf"]:
            written.also(self.schema(part, origin))

    def _write_any_of(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        written.put("anyOf", [self.schema(part, origin) for part in source["anyOf"]])

    def _write_one_of(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        branches: list[Schema] = source["oneOf"]
        overlapping = [
            (at, before)
            for at, one in enumerate(branches)
            for before in range(at)
            if not are_disjoint(one, branches[before], self._document)
        ]
        if not overlapping:
            written.put("anyOf", [self.schema(part, origin) for part in branches])
            return
        names = " and ".join(f"oneOf[{at}]" for at in reversed(overlapping[0]))
        advice = f"{names} may accept one value; give both a required property with other values of const, or write anyOf"
        if len(branches) > MAX_OVERLAPPING:
            raise self._document.refusal(origin, "oneOf", advice)
        exclusive: list[Schema] = [
            {"allOf": [one, *(self._negated(other, origin, "oneOf", advice) for other in branches[:at] + branches[at + 1 :])]}
            for at, one in enumerate(branches)
        ]
        written.put("anyOf", [self.schema(part, origin) for part in exclusive])

    def _negated(self, schema: Schema, origin: Any, keyword: str, advice: str) -> Schema:
        try:
            return complement(schema, self._document)
        except NoComplement as error:
            raise self._document.refusal(origin, keyword, f"{advice} (the opposite of {error} cannot be said)") from None

    def _write_not(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        advice = "not is possible where its opposite can be said in other keywords"
        written.also(self.schema(self._negated(source["not"], origin, "not", advice), origin))

    def _write_condition(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        condition: Schema = source["if"]
        if not {"then", "else"} & source.keys():
            return
        advice = "if is possible where its opposite can be said in other keywords"
        otherwise = self._negated(condition, origin, "if", advice)
        branches: list[Schema] = [
            {"allOf": [condition, source.get("then", True)]},
            {"allOf": [otherwise, source.get("else", True)]},
        ]
        written.put("anyOf", [self.schema(part, origin) for part in branches])

    def _write_dependencies(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        for name, others in source.get("dependentRequired", {}).items():
            self._write_dependency(name, {"required": others}, written, origin)
        for name, schema in source.get("dependentSchemas", {}).items():
            self._write_dependency(name, schema, written, origin)

    def _write_dependency(self, name: str, schema: Schema, written: Written, origin: Any) -> None:
        """Either the property is absent, or it is there and the schema holds; whatever is no object is free."""
        present: Schema = {"allOf": [{"type": "object", "required": [name]}, schema]}
        branches: list[Schema] = [{"properties": {name: False}}, present]
        written.put("anyOf", [self.schema(part, origin) for part in branches])

    def _write_contains(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        written.also(self.schema(arrays.contained(source, self._document, origin), origin))

    def _write_unique(self, source: dict[str, Any], written: Written, origin: Any) -> None:
        written.also(self.schema(arrays.unique(source, self._document, origin), origin))

    def _write_discriminator(self, source: dict[str, Any], _: Written, origin: Any) -> None:
        if not {"oneOf", "anyOf"} & source.keys():
            reason = "a discriminator is possible beside oneOf or anyOf, which say what it selects"
            raise self._document.refusal(origin, "discriminator", reason)
