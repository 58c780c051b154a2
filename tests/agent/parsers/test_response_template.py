"""Formats that a checkpoint describes itself are read as transformers reads them, in any pieces."""

import json
import random
import shutil
import time
from typing import Any

import pytest
from starling_agent.openai.output_format import OutputFormat
from starling_agent.openai.tools import OfferedTools, calls_form
from starling_agent.parsers import region_values
from starling_agent.parsers.parser import OutputParser
from starling_agent.parsers.region_values import RegionReader
from starling_agent.parsers.response_template import described_family
from starling_engine.errors import ConfigError, InvalidRequest
from starling_engine.frontend.tokenizer import Tokenizer
from transformers.utils.chat_parsing import parse_response

from tests.agent.conftest import MODEL, REPOSITORY
from tests.agent.parsers.outputs import assert_linear, collected, equal_pieces, groups, tokens_of

TOOLS = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
CALL = {"type": "function", "function": "{content}"}
JOINED = {"repeats": True, "join": "\n\n"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "literals": {
        "start_anchor": "<|bot|>",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": CALL},
            "content": {"close": "<|end|>"},
        },
    },
    "headers": {
        "start_anchor": ["<|bot|>", "<|reply|>"],
        "fields": {
            "thinking": {"open": "<|to|>self<|body|>", "close": "<|end|>"},
            "content": {"open": "<|to|>user<|body|>", "close": "<|end|>"},
            "tool_calls": {
                "open_pattern": r"<\|to\|>tools\.(?P<name>\w+)[^<]*<\|body\|>",
                "close": "<|end|>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    },
    "tags": {
        "start_anchor_pattern": r"<\|bot\|>\n?",
        "fields": {
            "reasoning": {"open_pattern": r"(?:^|<think>)\s*", "close": "</think>"},
            "content": {"open": "<answer>", "close_pattern": r"\n?</answer>"},
            "tool_calls": {
                "open_pattern": r"<call>\s*<f=(?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<p=(?P<key>\w+)>\s*(?P<value>.*?)\s*</p>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    },
    "joined": {
        "start_anchor": "<|bot|>",
        "fields": {
            "content": {"open": "<a>", "close": "</a>", **JOINED},
            "thinking": {"open": "<t>", "close": "</t>", **JOINED},
        },
    },
    "list": {
        "start_anchor": "<|bot|>",
        "fields": {
            "thinking": {"open": "[T]", "close": "[/T]"},
            "content": {},
            "notes": {"open": "[N]", "close": "[/N]"},
            "tool_calls": {
                "open": "[C]",
                "close": ["[/C]", "[/CALLS]"],
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<|'|>", "<|'|>"]]},
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{with}"}},
            },
        },
    },
}
OUTPUTS = [
    ("tags", "", "<answer>Yes</answer>"),
    ("joined", "", "<a>First.</a> and <t>one</t><a>Second.</a><t>two</t>"),
    ("literals", "", "Just text."),
    (
        "literals",
        "",
        '<think>\nHm.\n</think>\n\nLet me see.\n<call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</call>',
    ),
    (
        "literals",
        "<think>\n",
        'So.</think><call>{"name": "a", "arguments": {"x": 1}}</call> and <call>{"name": "b", "arguments": {}}</call>',
    ),
    ("literals", "", "a < b and <thin> air<|end|>"),
    ("headers", "", '<|to|>self<|body|>I look.<|end|><|to|>tools.get_weather json<|body|>{"city": "Bern", "days": 2}<|end|>'),
    ("headers", "<|to|>user<|body|>", "It is <sunny>.<|end|>"),
    ("tags", "", "thinking\n</think>\n<answer>Yes\n</answer>"),
    ("tags", "", "t</think><call>\n<f=get_weather>\n<p=city>Zürich</p>\n<p=days>\n2\n</p>\n</call>"),
    ("list", "", "[T]x[/T]Now.[N]hidden[/N][C][{tool:<|'|>get_weather<|'|>,with:{city:<|'|>a \"b\" {c:<|'|>,days:3}}][/C]"),
    ("list", "", '[C][{"tool": "a", "with": {}}, {"tool": "b", "with": {"k": [1, null]}}][/CALLS]'),
]
PROMPT = "<|user|>Hi <think> [C]<|end|><|bot|>"


def read(name: str, prefix: str, pieces: Any, tokens: tuple[str, ...] = (), *, is_cut: bool = False, tools: Any = TOOLS) -> Any:
    parser = OutputParser(described_family(TEMPLATES[name], tokens), tools, tokens, prefix=prefix)
    events = [event for text, offsets in pieces for event in parser.feed(text, offsets)]
    return collected([*events, *parser.finish(is_cut)])


@pytest.mark.parametrize(("name", "prefix", "output"), OUTPUTS)
def test_outputs_are_read_as_transformers_does(name, prefix, output):
    tools = [{"type": "function", "function": {"name": tool, "parameters": schema}} for tool, schema in TOOLS.items()]
    wanted = parse_response(output, TEMPLATES[name], prefix=PROMPT + prefix, tools=tools)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in wanted.get("tool_calls", ())]
    family = described_family(TEMPLATES[name], ())
    begun = (PROMPT + prefix)[max(found.end() for found in family.begins.finditer(PROMPT + prefix)) :]
    assert begun == prefix
    draw = random.Random(1)
    pieces = [
        [(output, [])],
        [(character, []) for character in output],
        list(groups(tokens_of(output, ()), iter(lambda: draw.randint(1, 5), 0))),
    ]
    for some in pieces:
        parsed = read(name, prefix, some)
        assert parsed.content.strip() == wanted.get("content", "")
        assert parsed.reasoning.strip() == (wanted.get("thinking") or wanted.get("reasoning") or "")
        assert [(called, json.loads(arguments)) for called, arguments in parsed.calls] == calls


def test_a_checkpoint_without_a_known_chat_template_brings_its_own(tmp_path):
    shutil.copytree(REPOSITORY / MODEL, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": "{{ messages }}", "response_template": TEMPLATES["literals"]}))
    tokenizer = Tokenizer.load(tmp_path)
    for name in ("auto", "response_template"):
        known = OutputFormat(tokenizer, name, name, whole_calls=False)
        reading = known.reading(TOOLS, tokenizer.encode("Hi<|bot|><think>\n"))
        parser = reading.parser()
        events = [*parser.feed('Hm.</think>Well.<call>{"name": "get_weather"}</call>'), *parser.finish(is_cut=False)]
        assert collected(events)[:3] == ("Well.", "Hm.", [("get_weather", "{}")])
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        calls_form(OfferedTools([], "required"), known.calls, parallel=True)
    with pytest.raises(ConfigError, match="tool_call_parser: the checkpoint's response_template"):
        OutputFormat(Tokenizer.load(REPOSITORY / MODEL), "response_template", "auto", whole_calls=False)


def test_a_message_that_goes_on_is_read_from_where_it_is():
    tokenizer = Tokenizer.load(REPOSITORY / MODEL)
    tokenizer.info["response_template"] = TEMPLATES["literals"]
    known = OutputFormat(tokenizer, "response_template", "response_template", whole_calls=False)
    assert not known.writes_headers
    reading = known.reading(None, tokenizer.encode("Hi<|bot|>It is "), reasons=False)
    assert collected([*(parser := reading.parser()).feed("so.<|end|>"), *parser.finish(is_cut=False)]).content == "so."


def test_reasoning_is_told_apart_where_only_calls_are_known():
    tokenizer = Tokenizer.load(REPOSITORY / MODEL)
    fields = {"thinking": {"open": "<reason>", "close": "</reason>"}, "content": {}}
    tokenizer.info["response_template"] = {"start_anchor": "<|bot|>", "fields": fields}
    reading = OutputFormat(tokenizer, "hermes", "response_template", whole_calls=False).reading(TOOLS, tokenizer.encode("Hi"))
    parser = reading.parser()
    parsed = collected([*parser.feed("<reason>secret</reason>Hello"), *parser.finish(is_cut=False)])
    assert (parsed.content, parsed.reasoning) == ("Hello", "secret")


def test_a_mark_that_is_a_token_counts_only_as_that():
    output, tokens = '<call>{"name": "a", "arguments": {"x": "</call>"}}</call>', ("<call>", "</call>")
    spelled = output.index("</call>")
    parsed = read("literals", "", tokens_of(output, tokens, lambda _, start: start == spelled), tokens)
    assert [json.loads(arguments) for _, arguments in parsed.calls] == [{"x": "</call>"}]


def test_what_is_no_call_or_cut_or_not_offered():
    broken = 'A <call>{"name": </call>.'
    assert read("literals", "", [(broken, [])]).content == broken
    assert read("literals", "", [('A <call>{"na', [])], is_cut=True)[:3] == ("A", "", [])
    call = '<call>{"name": "a", "arguments": {}}</call>'
    assert read("literals", "", [(call, [])], tools=None).content == call


@pytest.mark.parametrize(
    ("name", "begins", "repeats"),
    [
        ("headers", "<|to|>tools.x", "y"),
        ("headers", "", "<|to|>"),
        ("literals", "", "<call"),
        ("joined", "", "<a> </a>"),
        ("tags", "", "a "),
        ("tags", "<call><f=x>", "<p=a>1</p>"),
        ("list", '[C][{tool:"', '\\"'),
        ("list", "[C]", "<|'|>,{a "),
    ],
)
def test_hostile_outputs_take_linear_time(name, begins, repeats):
    assert_linear(lambda size: read(name, "", equal_pieces(begins + repeats * (size // len(repeats)))), 200_000)


@pytest.mark.parametrize("repeats", ['\\"', "<<", "{a ", ',"', "{b:", "  "])
def test_json_of_a_region_is_read_in_linear_time(repeats):
    options = {"allow_non_json": True, "unquoted_keys": True, "string_delims": [["<<", ">>"]]}
    assert_linear(lambda size: RegionReader().read("json", '{"' + repeats * (size // len(repeats)), options), 200_000)


@pytest.mark.parametrize("body", ["<p=a>" + " " * 100_000, "<p=a>" * 40_000], ids=["space", "tags"])
def test_tags_have_a_time_for_all_of_an_output(monkeypatch, body):
    monkeypatch.setattr(region_values, "TAG_SECONDS", 0.05)
    call = "<call><f=get_weather><p=city>Bern</p></call>"
    began = time.process_time()
    parsed = read("tags", "", [(f"{call}<call><f=x>{body}</call>{call}", [])])
    assert parsed.calls == [("get_weather", '{"city": "Bern"}')]
    assert body.strip() in parsed.content and parsed.content.endswith(call)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ([], "an object"),
        ({"fields": {"content": {}}}, "start_anchor"),
        ({"start_anchor": "a", "version": 2, "fields": {"content": {}}}, "version 1"),
        ({"start_anchor": "a", "fields": {"content": {}, "thinking": {}}}, "only one field"),
        ({"start_anchor": "a", "fields": {"content": {"content": "yaml"}}}, "yaml"),
        ({"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}}, "no expression"),
        ({"start_anchor": "a", "fields": {"content": {"open": 5}}}, "malformed"),
        ({"start_anchor": "a", "fields": {"content": {"open": ""}}}, "empty"),
        ({"start_anchor": "a", "fields": {"content": {"content": ["json"]}}}, "possible: text"),
        ({"start_anchor": "a", "fields": {"content": {"content_args": None}}}, "content_args"),
        ({"start_anchor": "a", "fields": {"tool_calls": {"content": "xml-inline"}}}, "tag_pattern"),
        (
            {"start_anchor": "a", "fields": {"tool_calls": {"content": "xml-inline", "content_args": {"tag_pattern": "a"}}}},
            "group key",
        ),
    ],
)
def test_a_description_that_is_wrong_is_refused(template, words):
    with pytest.raises(ValueError, match=words):
        described_family(template, ())
