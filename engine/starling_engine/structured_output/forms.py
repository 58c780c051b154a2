"""Writes the library's grammar of the form that a request wants."""

from collections.abc import Callable
from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.params import StructuredOutputsParams
from starling_engine.structured_output.callers_grammar import enforced_lark
from starling_engine.structured_output.constant_texts import ConstantTexts
from starling_engine.structured_output.enforced_schema import enforced_schema, parsed
from starling_engine.structured_output.expressions import check_expression
from starling_engine.structured_output.grammar import Grammar, check_unicode, grammar_text
from starling_engine.structured_output.lark import LarkRules, Part, RulePart, TextPart, expression, literal
from starling_engine.structured_output.special_tokens import NO_MARKS, ReasoningMarks, SpecialTokens
from starling_engine.structured_output.structural_tags import structural_grammars

FIELD = "structured_outputs"


def field_of(wanted: StructuredOutputsParams) -> str:
    """Returns the field that says the form, as errors name it. Raises `InvalidRequest` if not exactly one does."""
    values = {name: getattr(wanted, name) for name in _FORMS}
    given = [name for name, value in values.items() if value is not None and not (name == "json_object" and value is False)]
    if len(given) != 1:
        names = " and ".join(given) or "none"
        raise InvalidRequest(f"exactly one of {', '.join(_FORMS)} has to be given; there is {names}", FIELD)
    return f"{FIELD}.{given[0]}"


def grammar_of(
    wanted: StructuredOutputsParams, tokens: SpecialTokens, marks: ReasoningMarks | None, *, reasoning_open: bool = False
) -> str:
    """Returns the library's grammar for outputs of a form.

    Args:
        wanted: the form. Its types are right.
        tokens: what the tokenizer has besides text.
        marks: with which the model marks reasoning; None if it does not.
        reasoning_open: the prompt has begun to reason. Matters only where `wanted` allows it.

    Raises:
        InvalidRequest: what is not possible, with the field, and the path in it.
    """
    field = field_of(wanted)
    form = _FORMS[field.removeprefix(f"{FIELD}.")](wanted, field, tokens)
    calls = wanted.structural_tag is not None
    text = grammar_text(*(_reasoning(form, marks, is_open=reasoning_open, calls=calls) if wanted.reasoning else form))
    check_unicode(text, field)
    return text


def _reasoning(form: list[Grammar], marks: ReasoningMarks | None, *, is_open: bool, calls: bool) -> list[Grammar]:
    if marks is None:
        raise InvalidRequest(NO_MARKS, f"{FIELD}.reasoning")
    return marks.before(form, is_open=is_open, calls=calls)


def _json(wanted: StructuredOutputsParams, field: str, _: SpecialTokens) -> list[Grammar]:
    schema = parsed(wanted.json, field)
    return [{"json_schema": enforced_schema(schema, field, white_space=not wanted.disable_any_whitespace)}]


def _json_object(wanted: StructuredOutputsParams, field: str, _: SpecialTokens) -> list[Grammar]:
    return [{"json_schema": enforced_schema({"type": "object"}, field, white_space=not wanted.disable_any_whitespace)}]


def _regex(wanted: StructuredOutputsParams, field: str, _: SpecialTokens) -> list[Grammar]:
    assert wanted.regex is not None
    check_expression(wanted.regex, field)
    return [{"lark_grammar": f"start: {expression(wanted.regex)}"}]


def _choice(wanted: StructuredOutputsParams, field: str, tokens: SpecialTokens) -> list[Grammar]:
    if not wanted.choice:
        raise InvalidRequest("an empty list leaves no output at all", field)
    constants, rules = ConstantTexts(tokens), LarkRules()
    words: list[str] = []
    branches: list[list[Part]] = []
    for at, text in enumerate(wanted.choice):
        try:
            parts = constants.parts(text)
        except ValueError as error:
            raise InvalidRequest(str(error), f"{field}[{at}]") from None
        if any(isinstance(part, RulePart) for part in parts):
            branches.append(parts)
        else:
            words.append(literal(text))
    if words:  # as one terminal, which thousands of them may be
        branches.append([TextPart(" | ".join(words))])
    return [{"lark_grammar": rules.written([rules.one_of(branches)])}]


def _grammar(wanted: StructuredOutputsParams, field: str, tokens: SpecialTokens) -> list[Grammar]:
    assert wanted.grammar is not None

    def enforce(schema: Any, path: str) -> dict[str, Any]:
        return enforced_schema(schema, field, white_space=not wanted.disable_any_whitespace, path=path)

    return [{"lark_grammar": enforced_lark(wanted.grammar, field, tokens, enforce)}]


def _structural_tag(wanted: StructuredOutputsParams, field: str, tokens: SpecialTokens) -> list[Grammar]:
    white_space = not wanted.disable_any_whitespace
    return structural_grammars(wanted.structural_tag, field, tokens, white_space=white_space)


_FORMS: dict[str, Callable[[StructuredOutputsParams, str, SpecialTokens], list[Grammar]]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
