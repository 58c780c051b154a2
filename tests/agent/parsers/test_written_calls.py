"""Grammars of calls: what they let a model write is what the parsers read."""

import json
import time

import pytest
from starling_agent.parsers.families import FAMILIES
from starling_agent.parsers.schemas import GrammarSchema
from starling_agent.parsers.shown_calls import shown_calls
from starling_agent.parsers.written_arguments import gemma_arguments, python_arguments
from starling_agent.parsers.written_calls import json_arguments
from starling_engine.errors import InvalidRequest
from starling_engine.params import MAX_FORM_CHARACTERS

from tests.agent.parsers.outputs import parse_text
from tests.engine.structured_output.matching import FormMatcher

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": "string", "enum": ["c", "f"]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "look": None,
}
ARGUMENTS = {"city": "Zürich", "days": 2}


def written(family: str, name: str, arguments: dict) -> str:
    """Writes a call as the format's grammar has it."""
    form = FAMILIES[family].written
    text = json.dumps(arguments, ensure_ascii=False)
    tag = form.arguments(SCHEMAS[name])
    if form.arguments in (python_arguments, gemma_arguments):
        text = separated(arguments, is_python=form.arguments is python_arguments)
    elif tag["type"] == "sequence":
        text = ""
        for element in tag["elements"]:
            parts = (element["elements"][0] if element["type"] == "or" else element)["elements"]
            key = next(key for key in SCHEMAS[name]["properties"] if key in parts[0]["value"])
            if key in arguments:
                value = arguments[key]
                text += parts[0]["value"] + (value if isinstance(value, str) else json.dumps(value)) + parts[2]["value"]
    return f"{form.opens}{form.begins.replace('NAME', name)}{text}{form.ends}{form.closes}"


def separated(arguments: dict, *, is_python: bool) -> str:
    """Writes arguments as Llama 4 or as Gemma 4 does."""
    if is_python:
        return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    texts = {key: f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return ",".join(f"{key}:{text}" for key, text in texts.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_grammar_lets_pass_is_read_as_that_call(family):
    form = FAMILIES[family].written
    required = FormMatcher(structural_tag=form.required(SCHEMAS, parallel=False))
    for arguments in (ARGUMENTS, {**ARGUMENTS, "unit": "c"}):
        text = written(family, "get_weather", arguments)
        assert required.accepts(text)
        parsed = parse_text(family, text, tools=SCHEMAS)
        assert [(name, json.loads(sent)) for name, sent in parsed.calls] == [("get_weather", arguments)]
        assert not parsed.content.strip()
    for wrong in ({"city": "Zürich"}, {**ARGUMENTS, "unit": "k"}, {**ARGUMENTS, "days": "two"}):
        assert not required.accepts(written(family, "get_weather", wrong))
    assert not required.accepts("Hello.")
    assert not required.accepts(written(family, "get_weather", ARGUMENTS).replace("get_weather", "get_rain"))


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if shown_calls(family) is not None])
def test_calls_that_a_template_does_not_show_are_written_as_the_model_writes_them(family):
    shown = shown_calls(FAMILIES[family])
    calls = [{"function": {"name": "get_weather", "arguments": sent}} for sent in (ARGUMENTS, {"a": [True, None, {"b": 1}]})]
    parsed = parse_text(family, shown.text(calls[:1]), tools=SCHEMAS)
    assert [(name, json.loads(sent)) for name, sent in parsed.calls] == [("get_weather", ARGUMENTS)]
    if shown.between or FAMILIES[family].written.opens or FAMILIES[family].written.trigger:
        assert [json.loads(sent) for _, sent in parse_text(family, shown.text(calls), tools=SCHEMAS).calls] == [
            call["function"]["arguments"] for call in calls
        ]


@pytest.mark.parametrize("schema", [{}, {"type": ["object", "null"]}, {"properties": {"a": {"type": "integer"}}}], ids=str)
@pytest.mark.parametrize("family", ["hermes", "llama3_json", "kimi_k2"])
def test_arguments_are_an_object_where_the_schema_does_not_say_so(family, schema):
    form, call = FAMILIES[family].written, written(family, "look", {"a": 1})
    assert FormMatcher(structural_tag=form.required({"look": schema}, parallel=False)).accepts(call)
    for other in ("null", '"a"', "[1]"):
        assert not FormMatcher(structural_tag=form.required({"look": schema}, parallel=False)).accepts(
            call.replace('{"a": 1}', other)
        )


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.written.possible(SCHEMAS)])
def test_calls_that_are_possible_may_stand_in_text(family):
    form = FormMatcher(structural_tag=FAMILIES[family].written.possible(SCHEMAS))
    call = written(family, "get_weather", ARGUMENTS)
    assert form.accepts("Hello.")
    assert form.accepts(f"Let me see. {call}")
    assert not form.accepts(f"Let me see. {written(family, 'get_weather', {'city': 'Zürich'})}")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_with_a_grammar_is_held_to_it_where_json_writes_texts(family):
    form, text = FAMILIES[family].written, 'Say "é"\n\\o'
    schema = GrammarSchema("input", 'start: "Say " /.+/ LF /.*/\n%import common.LF', "tools", "A text.")
    matcher = FormMatcher(structural_tag=form.required({"say": schema}, parallel=False))
    begin, end = (part.replace("NAME", "say") for part in (form.opens + form.begins, form.ends + form.closes))
    around = {json_arguments: '{"input": %s}', python_arguments: "input=%s"}.get(form.arguments)
    if around is None:
        assert form.arguments(schema) == form.arguments(dict(schema))
        return
    call = f"{begin}{around % json.dumps(text, ensure_ascii=False)}{end}"
    assert matcher.accepts(call)
    assert [json.loads(sent) for _, sent in parse_text(family, call, tools={"say": schema}).calls] == [{"input": text}]
    assert not matcher.accepts(call.replace("Say ", "say "))


NESTED = {
    "type": "object",
    "properties": {
        "near": {"type": ["string", "null"]},
        "open": {"type": "boolean"},
        "filters": {
            "type": "object",
            "properties": {"tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}}, "price": {"type": "number", "maximum": 9}},
            "required": ["price"],
        },
        "other": {},
        "nothing": {"type": "null"},
    },
    "$defs": {"tag": {"enum": ["café", "bar", 1]}},
}
GEMMA = [
    ("", {}),
    ("open:true", {"open": True}),
    ('near:<|"|>a "b", {c}<|"|>,open:false', {"near": 'a "b", {c}', "open": False}),
    ("near:null,nothing:null", {"near": None, "nothing": None}),
    ('filters:{price:2.5,tags:[<|"|>café<|"|>,1]}', {"filters": {"tags": ["café", 1], "price": 2.5}}),
    ("filters:{price:2,tags:[]}", {"filters": {"tags": [], "price": 2}}),
    ('other:{a:[1,<|"|>x<|"|>],b:null},open:true', {"open": True, "other": {"a": [1, "x"], "b": None}}),
]
PYTHON = [
    ("", {}),
    ("open=True, nothing=None", {"open": True, "nothing": None}),
    ('near="a \\"b\\", (c)"', {"near": 'a "b", (c)'}),
    ('filters={"tags": ["bar", 1], "price": 2.5}, other={"a": [true, null]}', {
        "filters": {"tags": ["bar", 1], "price": 2.5}, "other": {"a": [True, None]},
    }),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments"), GEMMA)
def test_gemmas_arguments_nest(text, arguments):
    schemas = {"find": NESTED}
    call = f"<|tool_call>call:find{{{text}}}<tool_call|>"
    assert FormMatcher(structural_tag=FAMILIES["gemma4"].written.required(schemas, parallel=False)).accepts(call)
    assert [json.loads(sent) for _, sent in parse_text("gemma4", call, tools=schemas).calls] == [arguments]


@pytest.mark.parametrize("text", ["open:1", "nothing:1", ",open:true", "open:true,", "filters:{tags:[]}",
                                  "filters:{price:10}", 'filters:{price:1,tags:[<|"|>pub<|"|>]}', "else:1"])  # fmt: skip
def test_gemmas_arguments_keep_to_the_schema(text):
    form = FormMatcher(structural_tag=FAMILIES["gemma4"].written.required({"find": NESTED}, parallel=False))
    assert not form.accepts(f"<|tool_call>call:find{{{text}}}<tool_call|>")


@pytest.mark.parametrize(("text", "arguments"), PYTHON)
@pytest.mark.parametrize("family", ["lfm2", "llama4_pythonic"])
def test_arguments_in_python_are_constants_or_json(family, text, arguments):
    schemas, form = {"find": NESTED}, FAMILIES[family].written
    call = f"{form.opens}[find({text})]{form.closes}"
    assert FormMatcher(structural_tag=form.required(schemas, parallel=False)).accepts(call)
    assert [json.loads(sent) for _, sent in parse_text(family, call, tools=schemas).calls] == [arguments]
    assert not FormMatcher(structural_tag=form.required(schemas, parallel=False)).accepts(call.replace("find(", "find(open=1, "))


@pytest.mark.parametrize("family", ["gemma4", "lfm2", "llama4_pythonic"])
def test_names_have_hyphens_and_schemas_many_arguments_or_odd_ones(family):
    written, many = FAMILIES[family].written, {f"user-{n}": {} for n in range(20)}
    schemas = {"get-weather": {"type": "object", "properties": many, "required": ["user-3", {}, ["x"]]}}
    tag = written.required(schemas, parallel=False)
    assert len(json.dumps(tag)) < MAX_FORM_CHARACTERS
    body = "user-3:1,user-9:2" if family == "gemma4" else "user-3=1, user-9=2"
    call = f"{written.opens}{written.begins.replace('NAME', 'get-weather')}{body}{written.ends}{written.closes}"
    assert FormMatcher(structural_tag=tag).accepts(call)
    assert [(name, json.loads(sent)) for name, sent in parse_text(family, call, tools=schemas).calls] == [
        ("get-weather", {"user-3": 1, "user-9": 2})
    ]
    with pytest.raises(InvalidRequest, match="cannot be written"):
        written.required({"f": {"properties": {"a b": {}}, "required": ["a b"]}}, parallel=False)


def test_a_schema_that_refers_to_itself_ends():
    tree = {"type": "object", "properties": {f"child{n}": {"$ref": "#/$defs/tree"} for n in range(3)}}
    schema = {**tree, "$defs": {"tree": tree}}
    form = FormMatcher(structural_tag=FAMILIES["gemma4"].written.required({"f": schema}, parallel=False))
    assert form.accepts("<|tool_call>call:f{child0:{child2:{}},child1:{}}<tool_call|>")
    wide = {"type": "object", "properties": {f"child{n}": {"$ref": "#/$defs/tree"} for n in range(100)}}
    with pytest.raises(InvalidRequest, match="more than 2000 values"):
        FAMILIES["gemma4"].written.required({"f": {**wide, "$defs": {"tree": wide}}}, parallel=False)


def test_tools_have_a_bound_together():
    """Each of them alone is possible."""
    tree = {"type": "object", "properties": {f"child{n}": {"$ref": "#/$defs/tree"} for n in range(5)}}
    tools = {f"f{n}": {**tree, "$defs": {"tree": tree}} for n in range(1000)}
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="more than 100000 characters") as error:
        FAMILIES["gemma4"].written.required(tools, parallel=True, paths={name: f"tools[{name[1:]}]" for name in tools})
    assert error.value.param in ("tools[0]", "tools[1]", "tools[2]")
    assert time.process_time() - began < 2
