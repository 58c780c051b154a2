"""The jinja2 environment of chat templates, made to match transformers' so that every published template runs."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from starling_engine.errors import InvalidRequest, PromptTooLong
from starling_engine.frontend.template_reading import (
    loops_over_content,
    reads_field,
    sought_texts,
    tests_type_of_content,
    written_texts,
)

LARGEST_PROMPT = 16 << 20
"""Characters; the longest contexts take a quarter of it."""

_COMPILE_ERRORS = (jinja2.TemplateError, RecursionError, SyntaxError, ValueError)
"""Includes errors of Python, which refuses some of the code that jinja2 makes, such as 21 nested loops."""

_RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class CompiledTemplate:
    source: str
    template: jinja2.Template

    def render(self, /, **variables: Any) -> str:
        """Returns the prompt. Raises InvalidRequest for any error: templates reject messages (roles must alternate) by errors."""
        try:
            return "".join(_bounded(self.template.generate(variables)))
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from error

    @cached_property
    def reads_parts(self) -> bool:
        """True if a message's content may be a list of parts. Other templates print the list as Python does, or drop it."""
        return loops_over_content(self._tree)

    @cached_property
    def wants_parts(self) -> bool:
        """True if content must be a list: the template loops over it and never tests whether it is a string."""
        return self.reads_parts and not tests_type_of_content(self._tree)

    @cached_property
    def shows_tools_of_messages(self) -> bool:
        """True if tools are a text in a message, and no variable of the template."""
        return "tools" not in meta.find_undeclared_variables(self._tree) and reads_field(self._tree, "tools")

    @cached_property
    def shows_calls(self) -> bool:
        """True if the template reads the calls of messages."""
        return reads_field(self._tree, "tool_calls")

    @cached_property
    def sought(self) -> frozenset[str]:
        """Constant texts that the template looks for."""
        return sought_texts(self._tree)

    @cached_property
    def written(self) -> frozenset[str]:
        """Constant texts that the template may write."""
        return written_texts(self._tree)

    @property
    def _tree(self) -> nodes.Template:
        return self.template.environment.parse(self.source)


@lru_cache(maxsize=64)
def compile_template(source: str) -> CompiledTemplate:
    """Compiles a template; cached, because compiling takes longer than rendering. Raises ValueError for a wrong source."""
    try:
        return CompiledTemplate(source, _environment().from_string(source))
    except _COMPILE_ERRORS as error:
        if isinstance(error.__context__, MemoryError):  # jinja2 takes it for an error of syntax
            raise error.__context__ from None
        raise ValueError(str(error)) from error


def template_variables(source: str) -> frozenset[str]:
    """Returns the names that a template expects to be given; none for a source that cannot be compiled."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except _COMPILE_ERRORS:
        return frozenset()


def template_constants(source: str) -> frozenset[str]:
    """Returns the constant texts that a template looks for, or compares with; none for a source that cannot be compiled."""
    try:
        return compile_template(source).sought
    except ValueError:
        return frozenset()


def shows_tools(source: str) -> bool:
    """Says if a template shows tools; False for a source that cannot be compiled."""
    try:
        return "tools" in template_variables(source) or compile_template(source).shows_tools_of_messages
    except ValueError:
        return False


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > LARGEST_PROMPT:
            why = f"the prompt is too long: the chat template writes more than {LARGEST_PROMPT} characters"
            raise PromptTooLong(why, "messages")
        yield piece


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without HTML escapes, unlike jinja's own filter: no model was trained on them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """`dict(...)` without the type's attributes, by which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace(...)` without underscored attributes, for the same reason."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_underscore(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace")
