"""Reads the regions that a checkpoint's response template describes, and makes the fields of a message of them."""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import regex

Arguments = Mapping[str, Any]
TAG_SECONDS = 1.0
"""Processor time in which a template's own expression may look for tags in one output: it may take any power of a length."""
TAGS, LINES = "xml-inline", "kv-lines"
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_JSON_STRING = r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)'
"""Matches one that has no end, too, up to the text's: otherwise each quote in it would be looked at as a beginning."""
_BARE_KEY = r"(?<=[{,])\s*(?P<key>\w+)(?=\s*:)"


def _text(text: str, arguments: Arguments) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _bool(text: str, arguments: Arguments) -> bool:
    return _text(text, arguments).lower() in ("true", "1")


def _json(text: str, arguments: Arguments) -> Any:
    """Reads JSON, in which strings may have other marks around them, and keys none."""
    try:
        return json.loads(_plain_json(text, arguments))
    except (ValueError, RecursionError):
        if arguments.get("allow_non_json"):
            return _text(text, arguments)
        raise


def _plain_json(text: str, arguments: Arguments) -> str:
    marks = [
        f"{re.escape(opens)}(?:(?P<s{i}>.*?){re.escape(closes)}|.*)"  # likewise
        for i, (opens, closes) in enumerate(arguments.get("string_delims", ()))
    ]
    keys = [_BARE_KEY] if arguments.get("unquoted_keys") else []
    if not marks and not keys:
        return text

    def written(found: re.Match[str]) -> str:
        inner = next((value for value in found.groupdict().values() if value is not None), None)
        return found[0] if inner is None else json.dumps(inner)

    return re.sub("|".join((*marks, _JSON_STRING, *keys)), written, text, flags=re.DOTALL)


class RegionReader:
    """Reads the regions of one output, by the names that templates have for what is in them, which are `CONTENTS`.

    Raises ValueError, KeyError, regex.error, and TimeoutError once `TAG_SECONDS` have passed.
    """

    def __init__(self) -> None:
        self._left = TAG_SECONDS

    def read(self, content: str, text: str, arguments: Arguments) -> Any:
        if content == TAGS:
            return self._tags(text, arguments)
        return self._lines(text, arguments) if content == LINES else _PLAIN[content](text, arguments)

    def _tags(self, text: str, arguments: Arguments) -> dict[str, Any]:
        """Reads tags that each have a key and a value. Of a key that is there again the last one counts, unless they are merged."""
        values: dict[str, list[Any]] = {}
        for key, value in self._found(arguments["tag_pattern"], text):
            values.setdefault(key, []).append(self._inner(value, arguments))
        merges = arguments.get("merge_duplicates", False)
        return {key: several if merges and len(several) > 1 else several[-1] for key, several in values.items()}

    def _found(self, pattern: str, text: str) -> list[tuple[str, str]]:
        if self._left <= 0:
            raise TimeoutError
        began = time.process_time()  # it is what the expression's own limit counts
        try:
            found = [*regex.finditer(pattern, text, regex.DOTALL, timeout=self._left)]
        finally:
            self._left -= time.process_time() - began
        return [(one["key"], one.groupdict().get("value") or "") for one in found]

    def _lines(self, text: str, arguments: Arguments) -> dict[str, Any]:
        pairs = (line.partition(arguments.get("kv_sep", ":")) for line in text.split(arguments.get("line_sep", "\n")))
        return {_text(key, arguments): self._inner(_text(value, arguments), arguments) for key, is_pair, value in pairs if is_pair}

    def _inner(self, text: str, arguments: Arguments) -> Any:
        parser = arguments.get("value_parser")
        return text if parser is None else self.read(parser.get("name", "text"), text, parser.get("args", {}))


_PLAIN: Mapping[str, Callable[[str, Arguments], Any]] = {
    "text": _text,
    "int": lambda text, arguments: int(_text(text, arguments)),
    "float": lambda text, arguments: float(_text(text, arguments)),
    "bool": _bool,
    "json": _json,
}
CONTENTS = (*_PLAIN, TAGS, LINES)
"""Names that templates have for what is in a region."""


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Returns a template's `transform` with values in the place of its names, such as `{content.name}`. Raises KeyError."""
    if isinstance(transform, dict):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for name in found[1].split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(found[1])
        value = value[name]
    return value
