"""Parsers of outputs: formats without recorded outputs, what is malformed, and what is hostile."""

import itertools
import json
import random
import re
import time

import pytest
from starling_agent.parsers.families import FAMILIES, family_named, family_of_templates, reasoning_of_templates
from starling_agent.parsers.schemas import json_value, schema_of

from tests.agent.parsers.outputs import assert_linear, equal_pieces, groups, parse, parse_text, tokens_of

WEATHER = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
CALL = ("get_weather", {"city": "Zürich", "days": 2})
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]',
    "phi4_mini": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]<|/tool_call|>',
    "apriel": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]</tool_calls>',
    "llama4_json": '<|python_start|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}<|python_end|>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Zürich", days=2)]<|tool_call_end|>',
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Zürich]<]minimax[>[</city>'
        "]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>"
    ),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Zürich</steptml:parameter><steptml:parameter name="days">2</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
    ),
}
HOSTILE = {
    "brackets": ("llama4_pythonic", "", "["),
    "openings": ("hermes", "", "<tool_call>"),
    "objects": ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": '),
    "quotes": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\"),
    "digits": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1"),
    "space behind a comma": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, ', " "),
    "lists": ("mistral", "[TOOL_CALLS]", "["),
    "keys": ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>\n1\n</parameter>"),
    "values": ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>", "</tool_call>"),
    "space in a key": ("glm45", "<tool_call>f<arg_key>", "\n"),
    "keys without values": ("glm45", "<tool_call>f<arg_key>", "a</arg_key> "),
    "sections": ("deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    "space": ("hermes", "a", " "),
    "beginnings": ("kimi_k3", "", "<|open|>tools<|se"),
    "names": ("llama4_pythonic", "[", "a"),
    "calls": ("llama4_pythonic", "[", 'f(city="Zürich", country="Switzerland", at="noon"),'),
    "constants": ("llama4_pythonic", "[f(a=", "("),
    "tags": ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="false">'),
    "nesting": ("gemma4", "<|tool_call>call:f{", "the name of an argument that is an object:{"),
    "headers": ("openai", "", "<|channel|>"),
    "messages": ("openai", "", "<|start|>assistant<|channel|>final<|message|>a"),
    "words": ("hermes", "", "the quick brown fox "),
    "a head without an end": ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "f\n"),
    "beginnings of ends": (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">',
        "</｜DSML｜p",
    ),
    "calls without ends": ("deepseek_v41", "<｜DSML｜ calls>", '<｜DSML｜ invoke name="f">'),
    "ids": ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f", ":1"),
    "lines": ("seed_oss", "<seed:tool_call><function=f><parameter=a>\n", "\n</parameter>\n<"),
    "values without ends": ("minimax_m2", '<minimax:tool_call><invoke name="f">', '<parameter name="a">1'),
    "elements": ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>"),
    "quotes in names": ("step3", "<｜tool_calls_begin｜>", '<steptml:invoke name="'),
    "escapes": ("lfm2", "<|tool_call_start|>[f(a='", "\\'"),
    "objects without names": ("phi4_mini_json", "functools[", '{"a": "f", '),
    "objects as Python and JSON": (
        "llama4_json",
        "<|python_start|>",
        '{"name": "f", "parameters": {"city": "Zürich, by its lake"}}, ',
    ),
    "listed calls": ("granite", "<|tool_call|>[", '{"name": "f", "arguments": {"city": "Zürich, by its lake"}}, '),
    "objects alone": ("phi4_mini", "", '<|tool_call|>{"name": "f", "arguments": {"city": "Zürich, by its lake"}} '),
    "lists without ends": ("apriel", "", '<tool_calls>[{"name": "f", "arguments": {}}, '),
    "marks in a text": (
        "minimax_m3",
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<note>',
        "]<]minimax[>[<b",
    ),
    "calls of offered tools": ("llama3_json", "", '{"name": "f", "parameters": {}}; '),
}
"""Formats, and outputs that begin so, and repeat the last text."""


@pytest.mark.parametrize("family", WRITTEN)
def test_a_call_is_read_in_any_pieces(family):
    text = f"Let me see.{WRITTEN[family]}"
    for size in (1, 2, 5, 1000):
        pieces = groups(tokens_of(text, ()), itertools.repeat(size))
        parsed = parse(family, pieces, tools=WEATHER)
        assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == [CALL]
        assert parsed.whole == 1
        assert parsed.content == "Let me see."


@pytest.mark.parametrize(
    "behind", [', "x": ' + value for value in ("2", "-1.5e3", "true", "null", '"s"', "{}", "[1, {}]")] + ["}", "}}"]
)
def test_what_is_behind_the_arguments_of_a_call_is_no_content(behind):
    text = f'One.<tool_call>\n{{"name": "f", "arguments": {{"a": "1"}}{behind}}}\n</tool_call>'
    for size in (1, 3, 1000):
        parsed = parse("hermes", groups(tokens_of(text, ()), itertools.repeat(size)))
        assert (parsed.content, parsed.calls) == ("One.", [("f", '{"a": "1"}')])


@pytest.mark.parametrize("behind", ["The weather is fine. Call 3 done!", ": fine", "5 of them", ', "x": fine'])
def test_text_behind_a_call_without_its_brace_is_content(behind):
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": "1"}} {behind}'
    for size in (1, 3, 1000):
        parsed = parse("hermes", groups(tokens_of(text, ()), itertools.repeat(size)))
        assert parsed.content.endswith(behind.rpartition(": ")[2]) and parsed.calls == [("f", '{"a": "1"}')]


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.reasoning])
def test_reasoning_is_no_content(family):
    opens, closes = FAMILIES[family].reasoning[0]
    parsed = parse_text(family, f"{opens}Hm, 2 < 3.\n{closes}Yes.")
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("Hm, 2 < 3.", "Yes.", [])
    assert parse_text(family, f"Hm.{closes}Yes.", reasons=True)[:2] == ("Yes.", "Hm.")
    assert parse_text(family, "Hm", reasons=True, is_cut=True)[:2] == ("", "Hm")


def test_a_marker_that_is_a_token_counts_only_as_that_token():
    text = 'Write <tool_call>{"name": "f", "arguments": {}}</tool_call> to call.'
    assert parse("hermes", [(text, [])], tokens=["<tool_call>"]).content == text
    assert parse("hermes", [(text, [6])], tokens=["<tool_call>"]).calls == [("f", "{}")]


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"a": True, "b": None}', '{"a": true, "b": null}'),
        ('{"a": "x\ny\t"}', '{"a": "x\\ny\\t"}'),
        ('{"a": "C:\\dir"}', '{"a": "C:\\\\dir"}'),
        ('{"a": [1, 2,], }', '{"a": [1, 2]}'),
        ('{"a": "x" "b"', '{"a": "x"}'),
        ('{"a": nothing}', '{"a": null}'),
        ('{"a": {"b": [1', '{"a": {"b": [1]}}'),
        ('{"a": 1, "b"}', '{"a": 1, "b": null}'),
        ('{"a": 01}', '{"a": null}'),
        ('{"a": 1\u0662}', '{"a": null}'),  # an Arabic two, which JSON does not have
        ('{"a": "\\ud83d\\ude00", "b": 1e5}', '{"a": "\\ud83d\\ude00", "b": 1e5}'),
    ],
)
def test_arguments_are_json_whatever_the_model_writes(written, sent):
    """Checks outputs that were not cut."""
    for size in (1, 3, 1000):
        text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
        parsed = parse("hermes", groups(tokens_of(text, ()), itertools.repeat(size)))
        (name, arguments), *others = parsed.calls
        assert not others
        assert name == "f"
        assert json.loads(arguments) == json.loads(sent)


def test_a_call_that_is_cut_is_sent_as_far_as_it_came_or_not_at_all():
    text = 'One.<tool_call>{"name": "f", "arguments": {"a": "x'
    assert parse_text("hermes", text, is_cut=True) == ("One.", "", [("f", '{"a": "x')], 0)
    assert parse_text("hermes", text, is_cut=True, whole_calls=True) == ("One.", "", [], 0)
    assert parse_text("hermes", text[:20], is_cut=True) == ("One.", "", [], 0)


def test_arguments_with_whole_calls_are_what_the_model_wrote():
    text = '<tool_call>{"name": "f", "arguments": {"a": nothing}}</tool_call>'
    assert parse_text("hermes", text).calls == [("f", '{"a": null}')]
    assert parse_text("hermes", text, whole_calls=True).calls == []


def test_each_format_has_a_hostile_output():
    assert {family for family, _, _ in HOSTILE.values()} == FAMILIES.keys()


@pytest.mark.parametrize(("family", "begins", "repeats"), HOSTILE.values(), ids=HOSTILE)
def test_no_output_takes_more_than_linear_time(family, begins, repeats):
    def work(size: int) -> None:
        text = begins + repeats * (size // len(repeats))
        parse(family, equal_pieces(text), tools={"f": NESTED})
        parse_text(family, text, tools={"f": NESTED}, is_cut=True)

    assert_linear(work, 100_000)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 300), marks=pytest.mark.whole)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_output_breaks_a_parser(family, seeds):
    markers = [*FAMILIES[family].markers, *WRITTEN.values()]
    parts = [
        *markers,
        *markers,
        "{",
        "}",
        '"name"',
        '"arguments"',
        ": ",
        ", ",
        "f(",
        "a=1",
        ")",
        "\n",
        "[",
        "]",
        "to=functions.f",
        "\\",
        '"',
    ]
    for seed in seeds:
        draw = random.Random(seed)
        text = "".join(draw.choices(parts, k=draw.randint(1, 25)))
        pieces = tokens_of(text, FAMILIES[family].markers)
        for settings in ({"is_cut": False}, {"is_cut": True}, {"is_cut": False, "whole_calls": True}):
            for tokens in (FAMILIES[family].markers, ()):
                settings["tokens"] = tokens
                whole = parse(family, groups(pieces, itertools.repeat(1000)), tools={"f": None}, **settings)
                split = parse(family, groups(pieces, itertools.repeat(1)), tools={"f": None}, **settings)
                assert whole == split, text
            if not settings["is_cut"]:
                assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls), text


def test_formats_are_found_by_their_names_and_in_templates():
    assert family_named("glm47") is FAMILIES["glm45"]
    assert family_named("none") is None
    assert family_of_templates(["{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"]) is None
    qwen = '{%- if tools %}<tool_call>{"name": ...}</tool_call>{% endif %}{% if x %}<think>{% endif %}'
    assert family_of_templates([qwen]) is FAMILIES["hermes"]
    assert reasoning_of_templates([qwen]).reasoning == (("<think>", "</think>"),)
    assert reasoning_of_templates(["<tool_call>"]) is None
    assert family_of_templates(["<tool_calls><tool_call>name"]) is None
    assert family_of_templates([f"<|start_header_id|>{qwen}"]) is FAMILIES["hermes"]


@pytest.mark.parametrize(
    ("name", "reasons", "template"),
    [
        ("deepseek_v32", True, "{%- set dsml = '｜DSML｜' -%}{{ '</think>\\n\\n<' + dsml + 'function_calls>\\n' }}"),
        ("deepseek_v4", True, "{%- set dsml = '｜DSML｜' -%}{{ '</think>\\n\\n<' + dsml + 'tool_calls>\\n' }}"),
        ("deepseek_v41", True, "{%- set dsml = '｜DSML｜' -%}{{ '</think>\\n\\n<' + dsml + ' calls>\\n' }}"),
        ("deepseek_v41", True, "</think>\n\n<｜DSML｜ calls>\n"),
        ("kimi_k3", True, "{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}{{- open_tag('think' if thinking else 'response') -}}"),
        (
            "llama4_json",
            False,
            """{{- '<|header_end|>' -}}{{- '<|header_start|>' }}{{- '<|python_start|>' }}{{- '{"name": "' + name }}""",
        ),
        ("llama4_pythonic", False, '"Use exact format: [func_name1(param1=value1)]"{{- "<|header_start|>system<|header_end|>" }}'),
        (
            "phi4_mini",
            False,
            "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}",
        ),
        ("apriel", True, '<tool_call></tool_call> XML tags: <tool_calls>[{"name": ...}]</tool_calls> [BEGIN FINAL RESPONSE]'),
        ("lfm2", False, '{{ "List of tools: <|tool_list_start|>[" }}{{ "<|tool_response_start|>" + content }}'),
        ("lfm2", True, '{{ "List of tools: [" }}{% if not keep_past_thinking and "</think>" in content %}{% endif %}'),
    ],
)
def test_formats_are_found_in_templates_that_put_their_marks_together(name, reasons, template):
    """Such are llama.cpp's templates of DeepSeek, Kimi K3 and Apriel, Liquid's own, which show no calls, and Phi-4-mini's."""
    assert family_of_templates([template]) is FAMILIES[name]
    found = reasoning_of_templates([template])
    assert (found is not None and found.reasoning == FAMILIES[name].reasoning) is reasons


NESTED = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "empty": {"type": "object"},
    },
    "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "string"}, "tags": {"type": "array"}}}},
}


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("<note>a < b\n</note>", {"note": "a < b\n"}),
        ("<note>2</note><days>2</days><open>true</open>", {"note": "2", "days": 2, "open": True}),
        ("<places><item><zip>8001</zip><tags><item>1</item><item>x</item></tags></item><item></item></places>",
         {"places": [{"zip": "8001", "tags": [1, "x"]}, {}]}),
        ("<places></places><empty></empty>", {"places": [], "empty": {}}),
        ("<other><item><a>1</a></item></other><more><a>x</a></more>", {"other": [{"a": 1}], "more": {"a": "x"}}),
        ("<a>1</a><a>2</a><b><a>3</a></b><b><a>4</a></b>", {"a": 1, "b": {"a": 3}}),
        ("<places>[{\"zip\": \"8001\"}]</places>", {"places": [{"zip": "8001"}]}),
        ("<other><item><a>1</a>", {"other": [{"a": 1}]}),
    ],
)  # fmt: skip
def test_elements_in_each_other_are_objects_and_lists(written, sent):
    """Checks what the template of MiniMax M3 writes, and what is like it."""
    mark = "]<]minimax[>["
    tags = re.sub("<(?=[a-z/])", f"{mark}<", f'<tool_call>\n<invoke name="f">{written}</invoke>\n</tool_call>')
    for tokens, size in (((), 1), ((mark,), 1), ((mark,), 3), ((mark,), 1000)):
        pieces = groups(tokens_of(f"Well.{tags}", tokens), itertools.repeat(size))
        parsed = parse("minimax_m3", pieces, tools={"f": NESTED}, tokens=tokens)
        assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == [("f", sent)]
        assert parsed.content == "Well."


@pytest.mark.parametrize("behind", ["", " 2 > 1", "<days>3", "<b c", "</b>", "<", "</not"])
def test_a_mark_in_a_text_of_minimax_m3_drops_nothing_behind_it(behind):
    mark = "]<]minimax[>["
    text = f"a {mark}{behind} b"
    call = f'{mark}<tool_call>{mark}<invoke name="f"><note>{text}{mark}</note>{mark}<days>2{mark}</days>{mark}</invoke>'
    call = call.replace("<note>", f"{mark}<note>") + f"{mark}</tool_call>Bye."
    for tokens, size in (((), 1), ((mark,), 1), ((mark,), 1000)):
        parsed = parse("minimax_m3", groups(tokens_of(call, tokens), itertools.repeat(size)), tools={"f": NESTED}, tokens=tokens)
        assert [json.loads(arguments) for _, arguments in parsed.calls] == [{"note": text, "days": 2}]
        assert parsed.content == "Bye."
    left_out = call.replace(f"{mark}</note>{mark}<days>2{mark}</days>", "")
    assert json.loads(parse_text("minimax_m3", left_out, tools={"f": NESTED}).calls[0][1]) == {"note": text}


@pytest.mark.parametrize(
    "text",
    [
        'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]',
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]<|/tool_call|>',
        '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>\n<|tool_call|>{"name": "f", "arguments": {"a": 1}}',
    ],
)
@pytest.mark.parametrize("family", ["phi4_mini", "phi4_mini_json"])
def test_phi_writes_calls_in_three_ways(family, text):
    marks = ("<|tool_call|>", "<|/tool_call|>")
    for tokens, size in (((), 1), (marks, 1), (marks, 1000)):
        parsed = parse(family, groups(tokens_of(f"Well.{text}", tokens), itertools.repeat(size)), tools={"f": None}, tokens=tokens)
        assert [(name, json.loads(sent)) for name, sent in parsed.calls] == [("f", {"a": 1})] * 2
        assert parsed.content == "Well."
    other = "<|tool_call|> is how it begins,  <|/tool_call|> how it ends"
    assert parse_text(family, other).content == other


def test_apriel_calls_within_its_reasoning_and_answers_behind_a_mark():
    call = WRITTEN["apriel"]
    parsed = parse_text("apriel", f"Here are my reasoning steps:\nHm.\n{call}", tools=WEATHER)
    assert (parsed.reasoning, parsed.content, parsed.calls[0][0], parsed.whole) == ("Hm.", "", "get_weather", 1)
    parsed = parse_text("apriel", "Hm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]", reasons=True)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Yes.")


def test_a_marker_within_a_stop_string_is_still_one():
    """Holds the marker's end back, as detokenizing does while it may begin the stop string."""
    pieces = [("Hi<tool_call", [2]), ('>{"name": "f", "arguments": {}}', [])]
    assert parse("hermes", pieces, tokens=["<tool_call>"]) == ("Hi", "", [("f", "{}")], 1)


def test_text_that_looks_like_a_call_is_one_of_offered_tools_alone():
    tools = {"search": None}
    link = "[foo(bar) link](http://x)"
    assert parse_text("llama4_pythonic", link, tools=tools).content == link
    assert parse_text("llama4_pythonic", "[search(a=1)]", tools=tools).calls == [("search", '{"a": 1}')]
    prose = "Qwen writes `<function=NAME>` before the arguments."
    assert parse_text("qwen3_coder", prose, tools=tools) == (prose, "", [], 0)
    cut = '{"answer": "a long text'
    assert parse_text("llama3_json", cut, tools=tools, is_cut=True).content == cut


@pytest.mark.parametrize("family", ["llama4_json", "llama4_pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '\n[f(a=1)]',
        '<|python_start|><|python_end|>{"name": "f", "parameters": {"a": 1}}',
        '<|python_start|>{"type": "function", "name": "f", "parameters": {"a": 1}}<|python_end|>',
        "<|python_start|>[f(a=1)]<|python_end|>",
    ],
)  # fmt: skip
def test_llama_4_writes_calls_as_python_and_as_json(family, text):
    for size in (1, 3, 1000):
        parsed = parse(family, groups(tokens_of(text, ()), itertools.repeat(size)), tools={"f": None})
        assert [(name, json.loads(sent)) for name, sent in parsed.calls] == [("f", {"a": 1})]
        assert not parsed.content.strip()
    for other in (' {"a": [f(a=1)]}', "[1]", " Hello."):
        assert parse_text(family, other, tools={"f": None}) == (other, "", [], 0)


def test_halves_of_surrogate_pairs_do_not_leave():
    for family, text in (
        ("llama4_pythonic", "[f(a='\\ud800')]"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ):
        parsed = parse_text(family, text, tools={"f": None})
        assert parsed.calls
        for name, arguments in parsed.calls:
            assert (name + arguments).encode()


def test_white_space_of_text_without_calls_stays():
    for text in (" world", "    indented(code)\n", "\n\n"):
        assert parse_text("hermes", text).content == text


@pytest.mark.parametrize(
    ("value", "read"),
    [("\n", ""), ("\nv", "v"), ("\nv\n", "v"), ("v", "v"), ("\n\nv\n\n", "\nv\n"), ("\na </parameter> b\n", "a </parameter> b")],
)
def test_values_on_lines_and_within_one(value, read):
    text = f"<tool_call>\n<function=get_weather>\n<parameter=city>{value}</parameter>\n</function>\n</tool_call>"
    for size in (1, 1000):
        (call,) = parse("qwen3_coder", groups(tokens_of(text, ()), itertools.repeat(size)), tools=WEATHER).calls
        assert json.loads(call[1]) == {"city": read}


def test_a_schema_that_refers_to_itself_is_read():
    alternatives = [{"$ref": "#/$defs/A"}] * 1000
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": alternatives}}}
    began = time.process_time()
    assert json_value("1", schema_of(schema, "a")) == "1"
    assert time.process_time() - began < 1.0


def test_gpt_oss_without_headers_is_content():
    assert parse_text("openai", "<|message|>Hi<|return|>").content == "Hi"
    call = '<|channel|>commentary to=functions.f<|message|>{"a": 1}'
    assert parse_text("openai", call).calls == [("f", '{"a": 1}')]
    assert parse_text("openai", call, tools=None) == ('{"a": 1}', "", [], 0)
