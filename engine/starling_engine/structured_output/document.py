"""The schema as it was sent: how large it is, where each part of it stands, and which part a `$ref` means.

References are resolved as the specification says, within the document alone: nothing is ever fetched.
https://json-schema.org/draft/2020-12/json-schema-core#section-8
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote, urldefrag, urljoin

from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.keywords import Schema, fault_of
from starling_engine.structured_output.spelling import modern

Answer = TypeVar("Answer")

MAX_CHARACTERS = 100_000
"""Characters of a schema as compact JSON."""
MAX_NESTING = 100
"""Objects and lists around a value."""
MAX_WORK = 20_000
"""Schemas written, compared or negated for one request: some rewritings multiply."""


class SchemaDocument:
    """One schema, with limits on its size and on what is made of it.

    Schemas are looked up by identity, so that one that is part of another one made here still has its own path.
    """

    def __init__(self, root: Any, param: str | None) -> None:
        """Raises `InvalidRequest` for what is no schema or too large. `param` is the request's field, for all errors."""
        self._param = param
        self._work = 0
        self._parents: dict[int, tuple[Any, str | int]] = {}
        if not isinstance(root, dict | bool):
            raise self.refusal(root, None, "a schema has to be an object, true or false")
        self.root: Schema = root
        # What is looked up by identity is held, or another object might get its identity.
        self._modern: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._answers: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._made: list[Any] = []
        self._index()
        self._check_text()
        self._resources = self._identified()
        self._anchors = self._anchored()

    def spend(self, amount: int = 1) -> None:
        """Counts work, and raises `InvalidRequest` when it is too much."""
        self._work += amount
        if self._work > MAX_WORK:
            raise self.refusal(self.root, None, f"the schema needs more than {MAX_WORK} steps to be rewritten")

    def contains(self, node: Any) -> bool:
        """Returns whether this very object was sent, rather than made here."""
        return id(node) in self._parents or node is self.root

    def modern(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns a schema in the words of 2020-12. Raises `InvalidRequest` where a keyword has a value that it cannot have."""
        found = self._modern.get(id(schema))
        if found is None:
            found = self._modern[id(schema)] = self._in_modern_words(schema)
        return found[1]

    def _in_modern_words(self, schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The schema and its copy: who holds both can look them up by identity."""
        for keyword, value in schema.items():
            if fault := fault_of(keyword, value):
                raise self.refusal(schema, keyword, f"{keyword} {fault}")
        copy = modern(schema)
        for part in [copy, *copy.get("anyOf", ()), *copy.get("allOf", ())]:
            self.place(part, schema)
        return schema, copy

    def place(self, made: Schema, origin: Any) -> None:
        """Notes that a schema made here stands where another one does: path and references are the same."""
        if not self.contains(made) and id(origin) in self._parents:
            self._parents[id(made)] = self._parents[id(origin)]
            self._made.append(made)

    def remember(self, question: str, schema: Schema, answer: Callable[[], Answer]) -> Answer:
        """Returns what is known of a schema, or asks once."""
        key = (question, id(schema))
        if key not in self._answers:
            self.spend()
            self._answers[key] = (schema, answer())
        known: Answer = self._answers[key][1]
        return known

    def refusal(self, node: Any, keyword: str | None, reason: str) -> InvalidRequest:
        """Returns the error that names a keyword of a part of this document by its path."""
        steps = self._steps(node)
        if keyword is not None and isinstance(node, dict) and keyword in node:
            steps = [*steps, keyword]
        return InvalidRequest(f"{_path(steps)}: {reason}", self._param)

    def resolve(self, reference: str, node: Any) -> Schema:
        """Returns the schema that a reference means where `node` stands. Raises `InvalidRequest` if there is none here."""
        address, fragment = urldefrag(urljoin(self._base(node), reference))
        resource = self._resource(node) if reference.startswith("#") else self._resources.get(address)
        if resource is None:
            raise self.refusal(node, "$ref", f"{reference!r} is not in this schema, and others are not fetched; copy it into $defs")
        is_anchor = bool(fragment) and not fragment.startswith("/")
        target = self._anchors.get((id(resource), fragment)) if is_anchor else _pointed(resource, fragment)
        if not isinstance(target, dict | bool):
            raise self.refusal(node, "$ref", f"{reference!r} leads to no schema")
        return target

    def _index(self) -> None:
        """Notes every object's and list's place, a level at a time, so that no nesting overflows the stack."""
        level, nesting = [self.root], 0
        while level:
            nesting += 1
            if nesting > MAX_NESTING:
                raise self.refusal(self.root, None, f"the schema is nested more than {MAX_NESTING} levels deep")
            level = [child for node in level for child in self._children(node)]

    def _children(self, node: Any) -> list[Any]:
        entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        children = []
        for key, child in entries:
            if isinstance(child, dict | list):
                self._parents[id(child)] = (node, key)
                children.append(child)
        return children

    def _check_text(self) -> None:
        try:
            text = json.dumps(self.root, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            text.encode()
        except UnicodeEncodeError:
            raise self.refusal(self.root, None, "the schema has a string with half of a surrogate pair") from None
        except ValueError:
            raise self.refusal(self.root, None, "the schema has NaN, an infinity or a number of too many digits") from None
        if len(text) > MAX_CHARACTERS:
            raise self.refusal(self.root, None, f"the schema has {len(text)} characters; {MAX_CHARACTERS} are possible")

    def _steps(self, node: Any) -> list[str | int]:
        steps: list[str | int] = []
        while id(node) in self._parents:
            node, key = self._parents[id(node)]
            steps.insert(0, key)
        return steps

    def _identified(self) -> dict[str, Any]:
        """Schemas by their `$id`. An address that two of them have means neither."""
        found: dict[str, Any] = {}
        for node in self._objects():
            if _identity(node):
                address = urldefrag(self._base(node))[0]
                found[address] = None if address in found else node
        return found

    def _anchored(self) -> dict[tuple[int, str], Any]:
        """Schemas by the resource that they are part of and their anchor. One that two of them have means neither."""
        found: dict[tuple[int, str], Any] = {}
        for node in self._objects():
            for name in {node[word] for word in ("$anchor", "$dynamicAnchor") if isinstance(node.get(word), str)}:
                key = (id(self._resource(node)), name)
                found[key] = None if key in found else node
        return found

    def _objects(self) -> list[dict[str, Any]]:
        nodes = [parent[key] for parent, key in self._parents.values()]
        return [node for node in [self.root, *nodes] if isinstance(node, dict)]

    def _ancestors(self, node: Any) -> list[dict[str, Any]]:
        """The schemas with an `$id` around a node, itself included, the innermost first."""
        found = []
        while node is not None:
            if _identity(node):
                found.append(node)
            node = self._parents.get(id(node), (None, 0))[0]
        return found

    def _base(self, node: Any) -> str:
        base = ""
        for resource in reversed(self._ancestors(node)):
            base = urljoin(base, resource["$id"])
        return base

    def _resource(self, node: Any) -> Any:
        return next(iter(self._ancestors(node)), self.root)


def _identity(node: Any) -> str | None:
    """A schema's `$id`, unless it is the fragment alone that drafts before 2019-09 named a part by."""
    address = node.get("$id") if isinstance(node, dict) else None
    return address if isinstance(address, str) and not address.startswith("#") else None


def _pointed(resource: Any, pointer: str) -> Any:
    """The value at a JSON pointer (RFC 6901) as it stands in a URI's fragment; None where there is none."""
    for step in unquote(pointer).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(resource, list) and key.isascii() and key.isdigit() and int(key) < len(resource):
            resource = resource[int(key)]
        elif isinstance(resource, dict):
            resource = resource.get(key)
        else:
            return None
    return resource


def _path(steps: list[str | int]) -> str:
    return "$" + "".join(f".{step}" if _is_plain(str(step)) else f"[{json.dumps(step)}]" for step in steps)


def _is_plain(step: str) -> bool:
    return step.replace("$", "").replace("-", "").isidentifier()
