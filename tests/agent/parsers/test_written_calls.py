"""Grammars of calls: what they let a model write is what the parsers read."""

import json

import pytest
from starling_agent.parsers.families import FAMILIES

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
WRITTEN = [name for name, family in FAMILIES.items() if family.written is not None]


def written(family: str, name: str, arguments: dict) -> str:
    """Writes a call as the format's grammar has it."""
    form = FAMILIES[family].written
    assert form is not None
    text = json.dumps(arguments, ensure_ascii=False)
    tag = form.arguments(SCHEMAS[name])
    if tag["type"] == "sequence":
        text = ""
        for element in tag["elements"]:
            parts = (element["elements"][0] if element["type"] == "or" else element)["elements"]
            key = next(key for key in SCHEMAS[name]["properties"] if key in parts[0]["value"])
            if key in arguments:
                value = arguments[key]
                text += parts[0]["value"] + (value if isinstance(value, str) else json.dumps(value)) + parts[2]["value"]
    return f"{form.opens}{form.begins.replace('NAME', name)}{text}{form.ends}{form.closes}"


@pytest.mark.parametrize("family", WRITTEN)
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


@pytest.mark.parametrize("family", [name for name in WRITTEN if FAMILIES[name].written.possible(SCHEMAS)])
def test_calls_that_are_possible_may_stand_in_text(family):
    form = FormMatcher(structural_tag=FAMILIES[family].written.possible(SCHEMAS))
    call = written(family, "get_weather", ARGUMENTS)
    assert form.accepts("Hello.")
    assert form.accepts(f"Let me see. {call}")
    assert not form.accepts(f"Let me see. {written(family, 'get_weather', {'city': 'Zürich'})}")
