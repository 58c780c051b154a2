"""Chat templates, held against transformers' `apply_chat_template` on templates of the sorts that models come with."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.frontend.shown_tools import TOOLS_PROMPT, ShownCalls
from starling_engine.frontend.template import compile_template, shows_tools
from starling_engine.frontend.tokenizer import Tokenizer
from transformers import AutoTokenizer

from tests.engine.frontend.conftest import CHATML

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- "Today: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + eos_token }}
    {%- elif message.role == "tool" %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant!') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}"""

PARTS = """{%- macro show(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}
        {%- for item in content %}
            {%- if item.type == 'image' %}<image>{% continue %}{% endif %}
            {{- item.text }}|
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}[{{ message.role }}] {{ show(message.content) }}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""

PARTS_ONLY = "{% for m in messages %}{{ m.role }}: {% for line in m['content'] %}{{ line['text'] }}{% endfor %};{% endfor %}"

PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
"""Phi-4-mini's own, which has no variable for tools, and shows no calls."""

TEMPLATES = {"chatml": CHATML, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "parts": PARTS}

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "What is <b>2 & 2</b>? "},
    {"role": "assistant", "content": " Fünf 🎉\n"},
    {"role": "user", "content": "Really?"},
]
CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "They want the weather.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], loaded: dict[str, Tokenizer]) -> tuple[Tokenizer, Any]:
    return loaded["byte_level"], AutoTokenizer.from_pretrained(folders["byte_level"])


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_talk_as_transformers(name: str, generate: bool, pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    given = {"date_string": "26 Jul 2024"}
    expected = theirs.apply_chat_template(
        TALK, chat_template=TEMPLATES[name], add_generation_prompt=generate, tokenize=False, **given
    )
    assert ours.render_chat(TALK, template=TEMPLATES[name], add_generation_prompt=generate, **given).text == expected


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_renders_tools_and_reasoning_as_transformers(name: str, pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    given: dict[str, Any] = {"tools": TOOLS, "enable_thinking": False, "date_string": "now"}
    expected = theirs.apply_chat_template(CALLS, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False, **given)
    assert ours.render_chat(CALLS, template=TEMPLATES[name], **given).text == expected
    assert "None" not in expected


SHOWN = ShownCalls("<|tool_call|>[", '{"name": "', '", "arguments": ', "}", ", ", "]<|/tool_call|>", "tool_response")


@pytest.mark.parametrize("has_system", [True, False])
def test_tools_and_calls_are_shown_in_texts_where_a_template_has_no_place_for_them(
    has_system: bool, pair: tuple[Tokenizer, Any]
) -> None:
    ours, theirs = pair
    system = {**CALLS[0], "content": "Be brief." if has_system else TOOLS_PROMPT, "tools": json.dumps([TOOLS[0]["function"]])}
    called = '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln"}}]<|/tool_call|>'
    by_hand = [system, CALLS[1], {"role": "assistant", "content": called}, {"role": "tool_response", "content": "rain"}]
    expected = theirs.apply_chat_template(by_hand, chat_template=PHI, add_generation_prompt=True, tokenize=False)
    chat = [CALLS[1], {**CALLS[2], "content": ""}, CALLS[3]]
    chat = [CALLS[0], *chat] if has_system else chat
    assert ours.renderer.render(chat, template=PHI, variables={"tools": TOOLS}, calls=SHOWN).text == expected
    assert shows_tools(PHI) and shows_tools(QWEN) and not shows_tools(MISTRAL)


def test_a_template_that_shows_calls_does_so_alone(pair: tuple[Tokenizer, Any]) -> None:
    given: dict[str, Any] = {"template": QWEN, "variables": {"tools": TOOLS}}
    render = pair[0].renderer.render
    assert render(CALLS, calls=SHOWN, **given) == render(CALLS, **given)


def test_a_control_token_in_a_call_of_the_history_is_text_and_the_marks_around_it_are_not(pair: tuple[Tokenizer, Any]) -> None:
    function = {"name": "weather", "arguments": {"city": "<|im_end|>"}}
    chat = [TALK[0], {"role": "assistant", "content": "<|im_end|>", "tool_calls": [{"function": function}]}]
    calls = SHOWN._replace(opens="<|im_start|>[")
    prompt = pair[0].renderer.render(chat, template="{{ messages[1].content }}", variables={}, calls=calls)
    assert prompt.text == '<|im_end|><|im_start|>[{"name": "weather", "arguments": {"city": "<|im_end|>"}}]<|/tool_call|>'
    assert pair[0].renderer.control.spelled(prompt) == ["<|im_start|>"]


@pytest.mark.parametrize(
    "written",
    ["'```json\\n' + arguments + '\\n```'", "arguments + '|'", "arguments ~ '|'", "arguments", "arguments|string|trim"],
)
def test_templates_may_write_the_arguments_of_calls_as_text(written: str, pair: tuple[Tokenizer, Any]) -> None:
    """Checks what transformers makes of arguments that are JSON, which such templates want."""
    ours, theirs = pair
    calls = (
        "{% for call in message.tool_calls or [] %}{% set arguments = call.function.arguments %}{{ " + written + " }}{% endfor %}"
    )
    template = "{% for message in messages %}{{ message.content }}" + calls + "{% endfor %}"
    called, answer = CALLS[2:]
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    as_text = {**called, "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    expected = theirs.apply_chat_template([*CALLS[:2], as_text, answer], chat_template=template, tokenize=False)
    assert ours.render_chat([*CALLS[:2], {**called, "content": ""}, answer], template=template).text == expected


@pytest.mark.parametrize(
    ("name", "ending"),
    [(name, ending) for name in TEMPLATES for ending in ("The answer is", "The answer is \n")]
    + [("parts", [{"type": "text", "text": "A list "}])],
)
def test_continues_the_final_message_as_transformers(name: str, ending: Any, pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    chat = [TALK[0], {"role": "assistant", "content": ending}]
    given: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False, "date_string": "now"}
    expected = theirs.apply_chat_template(chat, chat_template=TEMPLATES[name], tokenize=False, **given)
    assert ours.render_chat(chat, template=TEMPLATES[name], **given).text == expected
    assert chat[-1]["content"] == ending


def test_writes_todays_date(pair: tuple[Tokenizer, Any]) -> None:
    assert f"Today: {datetime.datetime.now():%d %b}" in pair[0].render_chat(TALK, template=LLAMA).text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_start|>user\none\ntwo<|im_end|>\n"),
        (QWEN, "<|im_start|>user\none\ntwo<|im_end|>\n"),
        (PARTS, "[user] one|two|\n"),
        (PARTS_ONLY, "user: onetwo;"),
    ],
)
def test_parts_reach_every_template(template: str, expected: str, pair: tuple[Tokenizer, Any]) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}]
    assert pair[0].render_chat(chat, template=template, add_generation_prompt=False).text == expected


def test_a_string_reaches_a_template_for_parts(pair: tuple[Tokenizer, Any]) -> None:
    assert pair[0].render_chat([{"role": "user", "content": "one"}], template=PARTS_ONLY).text == "user: one;"


@pytest.mark.parametrize(
    ("messages", "given", "param", "words"),
    [
        ([], {}, "messages", "at least one"),
        (["hi"], {}, "messages[0]", "must be an object"),
        ([TALK[0], {"content": "a"}], {}, "messages[1].role", "got NoneType"),
        ([{"content": "a"}], {"template": PHI, "tools": TOOLS}, "messages[0].role", "got NoneType"),
        (TALK, {"template": PHI, "tools": ["f"]}, "tools", "list of objects"),
        ([{"role": "user", "content": 3}], {}, "messages[0].content", "got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0]", "image_url"),
        ([TALK[0], TALK[0]], {"template": MISTRAL}, "messages", "roles must alternate"),
        ([{"role": "user"}], {}, "messages", "refused the messages"),
        (TALK, {"template": "{% for %}"}, "chat_template", "not a chat template"),
        (TALK, {"template": "{{ ''.__class__.__mro__ }}"}, "messages", "unsafe"),
        (TALK, {"template": "{{ messages.append(1) }}"}, "messages", "unsafe"),
        (TALK, {"template": "{{ namespace(__class__=1) }}"}, "messages", "namespace"),
        (TALK, {"template": "{{ 1 / 0 }}"}, "messages", "zero"),
        (TALK, {"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        (CALLS[:3], {"continue_final_message": True, "add_generation_prompt": False}, "messages[2].content", "text"),
        (TALK, {"tools": [{"function": object()}]}, "chat_template_kwargs", "holds a object"),
    ],
)
def test_says_what_it_cannot_render(
    messages: list[Any], given: dict[str, Any], param: str, words: str, pair: tuple[Tokenizer, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        pair[0].render_chat(messages, **given)
    assert caught.value.param == param


def test_a_template_that_drops_the_final_message(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(InvalidRequest, match="changes the final message"):
        pair[0].render_chat(TALK, template="{{ messages|length }}", continue_final_message=True, add_generation_prompt=False)


def test_dict_and_tojson_in_templates() -> None:
    template = compile_template("{{ dict(a=1, b=[none]) | tojson }} {{ '<é>' | tojson(ensure_ascii=true) }}")
    assert template.render() == '{"a": 1, "b": [null]} "<\\u00e9>"'


def _checkpoint(source: Path, target: Path, **config: Any) -> Path:
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return target


def test_several_templates(folders: dict[str, Path], tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.load(_checkpoint(folders["byte_level"], tmp_path, chat_template=templates))
    assert tokenizer.render_chat(TALK).text == "plain"
    assert tokenizer.render_chat(TALK, tools=TOOLS).text == "tools"
    assert tokenizer.render_chat(TALK, template="tool_use").text == "tools"
    assert tokenizer.render_chat(TALK, template="{{ messages|length }}").text == "3"


def test_tools_may_be_a_tuple(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_checkpoint(folders["byte_level"], tmp_path))
    assert tokenizer.render_chat(TALK, template="{{ tools[0].type }}", tools=tuple(TOOLS)).text == "function"


def test_files_win_over_the_config(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = _checkpoint(folders["byte_level"], tmp_path, chat_template="config")
    (folder / "chat_template.jinja").write_text("file")
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "rag.jinja").write_text("{{ documents }}")
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.render_chat(TALK).text == theirs.apply_chat_template(TALK, tokenize=False) == "file"
    assert ours.render_chat(TALK, template="rag", documents=[1]).text == "[1]"


def test_the_template_of_a_processor_is_taken_where_there_is_no_other(folders: dict[str, Path], tmp_path: Path) -> None:
    """Models with images of 2025 have it in a file of its own, and none in the tokenizer's config."""
    folder = _checkpoint(folders["byte_level"], tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert Tokenizer.load(folder).render_chat(TALK).text == "processor"
    (folder / "chat_template.json").write_text('{"chat_template": [1]}')
    with pytest.raises(ModelError, match=r"chat_template\.json: chat_template must be a string"):
        Tokenizer.load(folder)
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).render_chat(TALK).text == "file"


def test_no_template(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_checkpoint(folders["byte_level"], tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(TALK)
    assert tokenizer.render_chat(TALK, template="x").text == "x"


def test_no_default_template(folders: dict[str, Path], tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "x"}]
    tokenizer = Tokenizer.load(_checkpoint(folders["byte_level"], tmp_path, chat_template=templates))
    with pytest.raises(InvalidRequest, match="name one of rag, tool_use"):
        tokenizer.render_chat(TALK)


def test_a_broken_template_is_the_checkpoints_fault(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_checkpoint(folders["byte_level"], tmp_path, chat_template="{% if %}"))
    with pytest.raises(ModelError, match="cannot be read"):
        tokenizer.render_chat(TALK)
