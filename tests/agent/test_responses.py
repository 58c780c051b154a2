"""The Responses API, through OpenAI's client and its types."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from starling_agent.openai.responses.conversion import chat_fields
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.openai.responses.queries import page_of
from starling_agent.openai.tools import offered_tools
from starling_engine.errors import InvalidRequest

from tests.engine.structured_output.matching import FormMatcher

QUESTION = "What is the weather in Zürich?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ALL = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
CUSTOM = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n+a"}}\n</tool_call>'
HELLO: Any = {"role": "user", "content": "Hello"}
CALLED: Any = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
ANSWERED: Any = {"type": "function_call_output", "call_id": "a", "output": "12"}


@pytest.fixture(scope="module")
def client(tools_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def settings(raw: str, **more: Any) -> dict[str, Any]:
    extra = {"structured_outputs": {"choice": [raw]}}
    return {"model": "tools", "input": QUESTION, "tools": [WEATHER, PATCH], "extra_body": extra, **more}


def plain(response: Response) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]


def test_reasoning_text_and_calls_are_items_in_their_order(client):
    response = client.responses.create(**settings(ALL))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = response.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "Let me see.")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Zürich"})
    assert (response.status, response.output_text) == ("completed", "Let me see.")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


@pytest.mark.parametrize("raw", [ALL, CUSTOM, "Hello."], ids=["all", "custom", "text"])
def test_every_event_has_the_types_of_the_client_and_they_add_up(client, tools_server, raw):
    body = {key: value for key, value in settings(raw).items() if key != "extra_body"}
    body |= {"stream": True, "structured_outputs": {"choice": [raw]}}
    answer = tools_server.http.post("/v1/responses", json=body)
    checked = pydantic.TypeAdapter(ResponseStreamEvent)
    events = []
    for number, block in enumerate(answer.text.strip().split("\n\n")):
        name, data = block.split("\n")
        events.append(checked.validate_json(data.removeprefix("data: "), strict=True))
        assert (name, events[-1].sequence_number) == (f"event: {events[-1].type}", number)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    fields = [*json.loads(data.removeprefix("data: "))["response"]]
    assert fields[:6] == ["id", "object", "created_at", "completed_at", "status", "background"], "routers read them"
    assert fields[-1] == "usage", "routers read it, and nothing of a client's comes behind it"
    assert plain(events[-1].response) == plain(client.responses.create(**settings(raw)))
    for kind in ("output_text", "reasoning_text", "function_call_arguments", "custom_tool_call_input"):
        deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        done = [event for event in events if event.type == f"response.{kind}.done"]
        name = {"function_call_arguments": "arguments", "custom_tool_call_input": "input"}.get(kind, "text")
        assert deltas == "".join(getattr(event, name) for event in done)
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(events[-1].response.output)))


def test_the_clients_own_stream(client):
    extra = {"structured_outputs": {"choice": [ALL]}}
    with client.responses.stream(model="tools", input=QUESTION, tools=[WEATHER], extra_body=extra) as stream:
        final = stream.get_final_response()
    assert plain(final) == plain(client.responses.create(**settings(ALL)))


def test_a_custom_tool_is_called_with_a_text(client):
    (call,) = client.responses.create(**settings(CUSTOM)).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "*** Begin Patch\n+a")


def test_a_forced_call_of_a_custom_tool_fits_its_expression(client):
    tool: Any = {"type": "custom", "name": "dial", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}|x"}}
    settings: dict[str, Any] = {
        "model": "tools",
        "input": QUESTION,
        "tools": [tool],
        "tool_choice": {"type": "custom", "name": "dial"},
    }
    call = client.responses.create(**settings, max_output_tokens=500, temperature=0).output[-1]
    assert call.type == "custom_tool_call" and re.fullmatch("[0-9]{3}|x", call.input)
    tool["format"]["definition"] = "("
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**settings)
    assert error.value.param == "tools[0].format.definition"
    for expression, says in (("a" * 100_001, "characters"), (r"\p{Greek}", "not possible here"), ("a(?=b)", "looks ahead")):
        tool["format"]["definition"] = expression
        with pytest.raises(openai.BadRequestError, match=says) as error:
            client.responses.create(**settings)
        assert error.value.param == "tools[0].format.definition"


@pytest.mark.parametrize(
    ("regex", "accepted", "refused"),
    [
        (r"^[a-c]/\d$", ["a/1", "c/0"], ["a1", "a/1\n", ""]),
        (r"\$", ["$"], [r"\$", ""]),
        (r"a\\$", ["a\\"], ["a", "a\\$"]),
        (r"^a|b$", ["a", "b"], ["ab"]),
    ],
)
def test_an_expression_matches_the_whole_input(regex, accepted, refused):
    form = {"type": "grammar", "syntax": "regex", "definition": regex}
    body = {"model": "tools", "input": "x", "tools": [{"type": "custom", "name": "f", "format": form}]}
    fields, _ = chat_fields(ResponsesRequest.checked(body), [])
    tools = offered_tools(fields["tools"], None)
    assert tools is not None
    grammar = tools.tools[0].schema.grammar
    matcher = FormMatcher(structural_tag={"type": "structural_tag", "format": {"type": "json_string", "grammar": grammar}})
    assert [text for text in accepted if not matcher.accepts(json.dumps(text))] == []
    assert [text for text in refused if matcher.accepts(json.dumps(text))] == []


PATCHES = """
start: "*** Begin Patch" LF part+ "*** End Patch" LF?
part: added | changed
added: "*** Add File: " path LF ("+" text LF -> line)+
changed: "*** Update File: " path LF ("@@" LF | ("+" | "-" | " ") text LF){1,3}
path: /[a-z]{1,9}[.]py/
text: /.{0,9}/
%import common.LF
"""
PATCH_TEXT = re.compile(
    r"[*]{3} Begin Patch\n"
    r"([*]{3} Add File: [a-z]{1,9}[.]py\n([+].{0,9}\n)+|[*]{3} Update File: [a-z]{1,9}[.]py\n(@@\n|[-+ ].{0,9}\n){1,3})+"
    r"[*]{3} End Patch\n?"
)
SUMS = """
start: sum
sum: value (SP ADD SP value)~0..2
value: /[0-9]{1,3}/ | "(" sum ")"
SP: " "
ADD: "+"
"""


def custom(syntax: str, definition: str) -> Any:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "apply", "description": "Does it.", "format": form}


def forced(tool: Any, **more: Any) -> dict[str, Any]:
    choice: Any = {"type": "custom", "name": tool["name"]}
    return {"model": "tools", "input": QUESTION, "tools": [tool], "tool_choice": choice, "temperature": 0, **more}


def is_sum(text: str) -> bool:
    """Says if a text is a sum: each pair of brackets that has a sum is a value."""
    inner = r"[0-9]{1,3}( [+] [0-9]{1,3}){0,2}"
    while (shorter := re.sub(rf"\({inner}\)", "1", text)) != text:
        text = shorter
    return re.fullmatch(inner, text) is not None


@pytest.mark.parametrize(("grammar", "follows"), [(PATCHES, PATCH_TEXT.fullmatch), (SUMS, is_sum)], ids=["patches", "sums"])
def test_a_forced_call_of_a_custom_tool_follows_its_lark_grammar(client, grammar, follows):
    ended = []
    for temperature in (0, 0.5, 1, 1, 1, 2):
        options: Any = {"max_output_tokens": 400, "temperature": temperature}
        response = client.responses.create(**{**forced(custom("lark", grammar)), **options})
        call = response.output[-1]
        assert (call.type, call.name) == ("custom_tool_call", "apply")
        if response.status == "completed":
            assert follows(call.input)
            ended.append(call.input)
    assert ended


def test_a_lark_grammar_holds_among_text_unless_the_answer_has_a_form_of_its_own(client):
    tool = custom("lark", SUMS)
    body: dict[str, Any] = {"model": "tools", "input": QUESTION, "tools": [tool], "max_output_tokens": 2}
    assert client.responses.create(**body).output
    broken = {**body, "tools": [custom("lark", "start: what")]}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**broken)
    assert error.value.param == "tools[0].format.definition"
    shaped = client.responses.create(**broken, text={"format": {"type": "json_object"}}, temperature=0)
    assert shaped.status == "incomplete", "the likeliest beginning is no whole object"


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar", "syntax": "lark", "definition": "start: /a(?=b)/"}, "definition"),
        ({"type": "grammar", "syntax": "lark", "definition": 1}, "definition"),
        ({"type": "grammar", "syntax": "peg", "definition": "a"}, "syntax"),
        ({"type": "json"}, None),
        ("text", None),
    ],
)
def test_formats_of_custom_tools_that_are_not_possible_are_refused(client, form, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**forced({**custom("lark", SUMS), "format": form}))
    assert error.value.param == ".".join(filter(None, ("tools[0].format", param)))


CRM: Any = {
    "type": "namespace",
    "name": "mcp__crm",
    "description": "Customers.",
    "tools": [{**WEATHER, "name": "look-up"}, {"type": "custom", "name": "note"}, {"type": "web_search"}],
}


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_tools_of_namespaces_are_called_and_their_calls_say_so(client):
    raw = called("mcp__crm.look-up", '{"city": "Bern"}') + called("mcp__crm.note", '{"input": "b"}') + called("look-up", "{}")
    response = client.responses.create(**{**settings(raw), "tools": [CRM, {**WEATHER, "name": "look-up"}]})
    lookup, note, plain_call = response.output
    assert (lookup.type, lookup.namespace, lookup.name, json.loads(lookup.arguments)) == (
        "function_call",
        "mcp__crm",
        "look-up",
        {"city": "Bern"},
    )
    assert (note.type, note.namespace, note.name, note.input) == ("custom_tool_call", "mcp__crm", "note", "b")
    assert (plain_call.namespace, plain_call.name) == (None, "look-up")
    assert response.tools[0].name == "mcp__crm"


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ([{"type": "namespace", "name": "mcp__crm"}, {"type": "web_search"}], ["mcp__crm.look-up", "mcp__crm.note"]),
        ([{"type": "custom", "name": "note", "namespace": "mcp__crm"}], ["mcp__crm.note"]),
        ([{"type": "function", "name": "get_weather"}], ["get_weather"]),
    ],
)
def test_namespaces_and_their_tools_can_be_allowed(allowed, names):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    body = {"model": "tools", "input": "a", "tools": [CRM, WEATHER], "tool_choice": choice}
    fields, _ = chat_fields(ResponsesRequest.checked(body), [])
    assert [tool[tool["type"]]["name"] for tool in fields["tool_choice"]["allowed_tools"]["tools"]] == names


def test_calls_in_the_history_have_the_models_names():
    note = {"type": "custom_tool_call", "call_id": "a", "namespace": "crm", "name": "note", "input": "a"}
    items = [HELLO, {**CALLED, "namespace": "crm"}, ANSWERED, note, ANSWERED]
    fields, _ = chat_fields(ResponsesRequest.checked({"model": "tools", "input": items}), [])
    calls = [call[call["type"]]["name"] for message in fields["messages"] for call in message.get("tool_calls", ())]
    assert calls == ["crm.get_weather", "crm.note"]


def test_a_call_of_a_namespaces_tool_can_be_required(client):
    only = {**CRM, "tools": CRM["tools"][:1]}
    body: dict[str, Any] = {"model": "tools", "input": QUESTION, "tools": [only], "tool_choice": "required"}
    call = client.responses.create(**body, max_output_tokens=300, temperature=0).output[0]
    assert (call.type, call.namespace, call.name) == ("function_call", "mcp__crm", "look-up")


def test_a_response_is_continued_seen_and_deleted(client):
    first = client.responses.create(**settings(ALL), instructions="Be brief.")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12 °C"}
    second = client.responses.create(
        model="tools",
        input=[output],
        previous_response_id=first.id,
        tools=[WEATHER, PATCH],
        instructions="Be brief.",
        max_output_tokens=2,
    )
    assert second.previous_response_id == first.id
    assert second.status == "incomplete" and second.incomplete_details.reason == "max_output_tokens"
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output == first.output
    items = client.responses.input_items.list(first.id).data
    assert items[0].content[0].text == QUESTION
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model="tools", input="x", previous_response_id=first.id)
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be") as wrong:
        client.responses.create(model="tools", input="x", max_output_tokens=0)
    assert wrong.value.param == "max_output_tokens"
    third = client.responses.create(model="tools", input="And tomorrow?", previous_response_id=second.id, max_output_tokens=2)
    alone = client.responses.create(model="tools", input="And tomorrow?", max_output_tokens=2)
    assert third.usage.input_tokens > alone.usage.input_tokens


def test_items_are_listed_by_pages(client):
    items = [{"role": "user", "content": text} for text in "abc"]
    made = client.responses.create(model="tools", input=items, max_output_tokens=2)
    listed = client.responses.input_items.list(made.id, limit=2)
    assert len(listed.data) == 2 and listed.has_more
    newest_first = [item.content for item in listed]  # the client asks for the next page
    assert newest_first == [item.content for item in client.responses.input_items.list(made.id, order="asc")][::-1]
    assert len(newest_first) == 3


def test_listed_items_are_those_of_the_sdk(client):
    """The items are as clients may send them, with as little as possible."""
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}], "status": None},
        {"role": "assistant", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "output_text", "text": "d"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "e"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}", "id": None},
        {"type": "function_call_output", "call_id": "c1", "output": "f"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "write", "input": "g"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "h"},
    ]
    for sent in ("a text", items):
        made = client.responses.create(model="tools", input=sent, max_output_tokens=2)
        answer = client.responses.input_items.with_raw_response.list(made.id, order="asc")
        listed = pydantic.TypeAdapter(ResponseItemList).validate_json(answer.content, strict=True)
        assert len(listed.data) == (1 if sent == "a text" else len(items))
        assert {item.id for item in listed.data} == {f"item_{i}" for i in range(len(listed.data))}


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, ["item_2", "own", "item_0"], False),
        ({"order": "asc", "limit": "2"}, ["item_0", "own"], True),
        ({"order": "asc", "after": "own"}, ["item_2"], False),
        ({"after": "item_0"}, [], False),
    ],
)
def test_a_page_of_items(query, ids, has_more):
    page = page_of([{}, {"id": "own"}, {}], query)
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids, has_more)
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize("query", [{"order": "up"}, {"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"after": "item_3"}])
def test_a_page_that_cannot_be(query):
    with pytest.raises(InvalidRequest) as error:
        page_of([{}, {}], query)
    assert error.value.param in query


def test_what_goes_with_a_stored_response_is_all_that_it_has(client):
    made = client.responses.create(**settings("Hello."), include=["message.output_text.logprobs"], top_logprobs=1)
    seen = client.responses.retrieve(made.id, include=["message.output_text.logprobs", "reasoning.encrypted_content"])
    assert seen.output[0].content[0].logprobs and seen.output == made.output
    assert client.responses.retrieve(made.id, include_obfuscation=False).output == made.output
    for ask in (client.responses.retrieve, client.responses.input_items.list):
        with pytest.raises(openai.BadRequestError) as error:
            ask(made.id, include=["web_search_call.results", "message.output_text.lyrics"])
        assert error.value.param == "include[]"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.retrieve(made.id, include_obfuscation=True)
    assert error.value.param == "include_obfuscation"


def test_what_is_not_to_be_stored_is_not(client):
    response = client.responses.create(**settings("x"), store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stateless_conversation_as_agents_send_it(client):
    """Codex and others send all items again, reasoning included, and offer tools that OpenAI hosts."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Zürich"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "12 °C"},
    ]  # fmt: skip
    response = client.responses.create(
        model="tools", input=items, tools=[WEATHER, {"type": "web_search"}], max_output_tokens=3, store=False,
        include=["reasoning.encrypted_content"], reasoning={"effort": "medium", "summary": "auto", "generate_summary": "auto"},
        parallel_tool_calls=True, text={"verbosity": "low"}, prompt_cache_key="k", extra_body={"client_metadata": {"a": "b"}},
    )  # fmt: skip
    assert response.status == "incomplete"


@pytest.mark.parametrize("context", [None, "auto", "all_turns"])
def test_what_codex_sends_to_models_of_openai_s_names_changes_nothing(context):
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]}
    body = {"model": "tools", "input": [HELLO, item], "reasoning": {"context": context}, "background_options": None}
    plain = {"model": "tools", "input": [HELLO]}
    assert chat_fields(ResponsesRequest.checked(body), [])[0] == chat_fields(ResponsesRequest.checked(plain), [])[0]


def test_logprobs_come_with_the_text(client):
    response = client.responses.create(**settings("Hello."), top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith("Hello.")
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_form_of_the_text(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    response = client.responses.create(model="tools", input=QUESTION, text=form, max_output_tokens=100, temperature=0)
    assert json.loads(response.output_text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [HELLO, CALLED | {"arguments": "{]"}, ANSWERED]}, "input[1].arguments"),
        ({"input": [HELLO, CALLED, ANSWERED, CALLED | {"call_id": "b"}], "instructions": "x"}, "input[3]"),
        ({"input": [HELLO, {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}]}, "input[1].tools"),
        ({"input": [HELLO, {"type": "additional_tools", "role": "developer"}]}, "input[1].tools"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"background_options": {"priority": 1}}, "background_options"),
        ({"tools": [{"type": "custom_made"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "a", "server_url": "http://a"}]}, "tools[1].type"),
        ({"tools": [{**CRM, "tools": None}]}, "tools[0].tools"),
        ({"tools": [{**CRM, "name": 1}]}, "tools[0].name"),
        ({"tools": [{**CRM, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, {**CRM, "tools": [WEATHER, {"type": "function", "name": 1}]}]}, "tools[1].tools[1].name"),
        ({"tools": [{**CRM, "tools": [WEATHER, {**WEATHER, "parameters": 1}]}]}, "tools[0].tools[1].parameters"),
        ({"tools": [CRM, {**CRM, "tools": [CRM["tools"][0]]}]}, "tools[1].tools[0].name"),
        ({"tools": [{**CRM, "tools": [CRM]}]}, "tools[0].tools[0].type"),
        ({"tools": [CRM, {**WEATHER, "parameters": {"$dynamicRef": "#x"}}], "tool_choice": "required"}, "tools[1].parameters"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "lowest"}}, "text.verbosity"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"temperature": 1000.0}, "temperature"),
        ({"nothing": 1}, "nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_named(tools_server, fields, param):
    answer = tools_server.http.post("/v1/responses", json={"model": "tools", "input": "x", "max_output_tokens": 2, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_response_belongs_to_the_key_that_made_it(start_server):
    flags = ("--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", "--api-key=one", "--api-key=two", "--prefix-cache-salt=none")
    server = start_server(*flags, "--served-model-name=pydoc")
    url, body = f"{server.url}/v1/responses", {"model": "pydoc", "input": "x", "max_output_tokens": 1}
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = httpx.post(url, json=body, headers=one, timeout=60).json()["id"]
    assert httpx.get(f"{url}/{made}", headers=two).status_code == 404
    assert httpx.delete(f"{url}/{made}", headers=two).status_code == 404
    assert httpx.post(f"{url}/{made}/cancel", headers=two).status_code == 404
    assert httpx.post(url, json={**body, "previous_response_id": made}, headers=two, timeout=60).status_code == 404
    assert httpx.get(f"{url}/{made}", headers=one).json()["id"] == made
    assert httpx.post(f"{url}/{made}/cancel", headers=one).status_code == 400
    assert httpx.delete(f"{url}/{made}", headers=one).json()["deleted"] is True
