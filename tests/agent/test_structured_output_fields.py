"""Requests say which form their output has, and the engine's parameters say it too; without a server."""

import json
from typing import Any

import pytest
from starling_agent.openai.field_names import errors_named
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.protocol.completion import CompletionRequest
from starling_agent.openai.protocol.sampling import SamplingFields
from starling_engine import SamplingParams
from starling_engine.errors import InvalidRequest
from starling_engine.params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"const": None}}, "title": "x"}
STRUCTURES = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
TEXT = {"type": "text", "json_schema": None}

FORMS: list[tuple[dict[str, Any], StructuredOutputsParams | None, str | None]] = [
    ({}, None, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None, None),
    ({"response_format": TEXT}, None, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True), "response_format"),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, **more}}},
            StructuredOutputsParams(json=SCHEMA),
            "response_format.json_schema.schema",
        )
        for more in ({}, {"name": "a", "strict": True}, {"name": "a", "strict": False, "description": "b"})
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
        StructuredOutputsParams(json=True),
        "response_format.json_schema.schema",
    ),
    *(
        (
            {"response_format": {"type": "structural_tag", **tag}},
            StructuredOutputsParams(structural_tag={"type": "structural_tag", **tag}),
            "response_format",
        )
        for tag in (STRUCTURES, {"format": {"type": "json_schema", "json_schema": SCHEMA, "x": None}})
    ),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA), "structured_outputs.json"),
    ({"structured_outputs": {"json": "{}"}}, StructuredOutputsParams(json="{}"), "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputsParams(json_object=True), "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a*"}}, StructuredOutputsParams(regex="a*"), "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=["a", "b"]), "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: A"}}, StructuredOutputsParams(grammar="start: A"), "structured_outputs.grammar"),
    (
        {"structured_outputs": {"structural_tag": json.dumps(STRUCTURES)}},
        StructuredOutputsParams(structural_tag=json.dumps(STRUCTURES)),
        "structured_outputs.structural_tag",
    ),
    (
        {
            "structured_outputs": {
                "json": SCHEMA,
                "regex": None,
                "json_object": False,
                "reasoning": True,
                "disable_any_whitespace": True,
            }
        },
        StructuredOutputsParams(json=SCHEMA, reasoning=True, disable_any_whitespace=True),
        "structured_outputs.json",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}},
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        "response_format",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_fallback": True, "whitespace_pattern": None, "_backend": "xgrammar"}},
        StructuredOutputsParams(regex="a"),
        "structured_outputs.regex",
    ),
    ({"response_format": TEXT, "guided_json": SCHEMA}, StructuredOutputsParams(json=SCHEMA), "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputsParams(json=json.dumps(SCHEMA)), "guided_json"),
    ({"guided_regex": ""}, StructuredOutputsParams(regex=""), "guided_regex"),
    ({"guided_choice": ["a"], "guided_decoding_backend": "outlines"}, StructuredOutputsParams(choice=["a"]), "guided_choice"),
    (
        {"guided_grammar": "root ::= a", "guided_decoding_backend": None},
        StructuredOutputsParams(grammar="root ::= a"),
        "guided_grammar",
    ),
]


def chat(fields: dict[str, Any]) -> SamplingFields:
    return ChatRequest.parse(json.dumps({"model": "a", "messages": [{"role": "user", "content": "a"}], **fields}).encode())


def completion(fields: dict[str, Any]) -> SamplingFields:
    return CompletionRequest.parse(json.dumps({"model": "a", "prompt": "a", **fields}).encode())


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("fields", "params", "field"), FORMS, ids=str)
def test_a_form_becomes_the_engines_parameters(parse, fields, params, field):
    form = parse(fields).form()
    made = None if form is None else form.params()
    assert made == params
    SamplingParams(structured_outputs=made).validate(100)
    assert (form.field if form else None) == field


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        ("structured_outputs.json", "response_format.json_schema.schema"),
        ("structured_outputs.json.properties.a", "response_format.json_schema.schema.properties.a"),
        ("structured_outputs.json[0]", "response_format.json_schema.schema[0]"),
        ("structured_outputs.json_object", "structured_outputs.json_object"),
        ("structured_outputs.reasoning", "structured_outputs.reasoning"),
        ("prompt", "messages"),
        ("prompt_logprobs", "prompt_logprobs"),
        (None, None),
    ],
)
def test_errors_name_the_field_of_the_request(raised, named):
    names = {"prompt": "messages", "structured_outputs.json": "response_format.json_schema.schema"}
    with pytest.raises(InvalidRequest) as error, errors_named(names):
        raise InvalidRequest(f"{raised} must be other", raised)
    assert (error.value.param, error.value.message) == (named, f"{named} must be other")
