"""Outputs of nine families of models, recorded by others, with the answers they expect; their rules judge ours (canitoolcall)."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import canitoolcall
import pytest
from canitoolcall import checks
from canitoolcall.fixtures import Family, Fixture
from canitoolcall.results import Observation, ParsedToolCall, ParseResult
from starling_agent.openai.output_format import has_opened_reasoning
from starling_agent.parsers.families import FAMILIES

from tests.agent.parsers.outputs import Piece, groups, parse, tokens_of

FIXTURES = Path(canitoolcall.__file__).parent / "_data" / "fixtures"
STREAMS = {"token": 1, **{f"rand:{seed}:8": 8 for seed in range(1, 6)}}
"""Groups of tokens, by the suite's name for them: the most tokens of one."""
EXPECTED_FAILURES = {
    # The call is sent as it is written, and its JSON is completed where it breaks.
    "deepseek/vllm-v3-malformed-missing-brace": "a call that is not cut",
    # Two others of the same format expect the same space to be kept.
    "gemma4/vllm-text-before-call": "the space before a call",
    # The first of two calls is complete, and so is all of a call but its last brace.
    "llama/l4-truncated-missing-close-bracket": "a call before one that is cut",
    "qwen3-hermes/vllm-invalid-json-missing-brace": "a call whose arguments are complete",
}
GOAL, GOAL_OF_WHOLE_CALLS = 410, 450
"""Outputs that are not cut, of 418; all outputs, of 469."""


def cases() -> list[tuple[dict[str, Any], Family]]:
    found = []
    for folder in sorted(FIXTURES.glob("*/")):
        family = Family.from_dict(json.loads((folder / "family.json").read_text()))
        found += [(json.loads(line), family) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return found


def format_of(case: dict[str, Any]) -> str:
    family, model = case["family"], case["models"][0]
    names = {"qwen3-hermes": "hermes", "qwen3-xml": "qwen3_coder", "glm": "glm45", "gpt-oss": "openai"}
    match family:
        case "kimi":
            return "kimi_k3" if "K3" in model else "kimi_k2"
        case "llama":
            return "llama4_pythonic" if "Llama-4" in model else "llama3_json"
        case "deepseek":
            versions = {"V4.1": "41", "V4": "4", "V3.2": "32", "V3.1": "31", "V3": "3"}
            return f"deepseek_v{next(number for name, number in versions.items() if name in model)}"
    return names.get(family, family)


def token_texts(case: dict[str, Any], family: Family) -> list[str]:
    """Returns the format's markers that are tokens of the model's tokenizer."""
    known = set(family.markers)
    if "Magistral-Small-2506" in case["models"][0]:
        known -= {"<think>", "</think>"}  # there they are text
    return [text for text in FAMILIES[format_of(case)].markers if text in known or text == "<|constrain|>"]


def spelled(case: dict[str, Any]) -> Callable[[str, int], bool]:
    """Returns which markers of an output are none: the ids of its tokens have them as text."""
    raw, name = case["raw_output"], case["id"]
    if name.startswith("mistral/") and "marker-in" in name:
        return lambda _, start: 0 < start < raw.index("[/THINK]")
    if name == "gpt-oss/harmony-marker-in-reasoning":
        return lambda _, start: raw.index("not write") < start < raw.index("myself")
    if name == "kimi/k3-control-marker-text-in-value":
        begin = raw.rindex('type="string"<|sep|>') + len('type="string"<|sep|>')
        return lambda _, start: begin <= start < raw.index(" is how args end")
    return lambda _, __: False


def opened_reasoning(case: dict[str, Any], family: Family) -> bool:
    prompt = case.get("generation_prompt")
    if prompt is None:
        models = family.reference_models
        prompt = next((model for model in models if model.repo == case["models"][0]), models[0]).default_generation_prompt or ""
    return has_opened_reasoning(FAMILIES[format_of(case)], prompt)


def result(case: dict[str, Any], family: Family, pieces: list[Piece], size: int | None, seed: int, **settings: Any) -> ParseResult:
    draw = random.Random(seed)
    sizes = itertools.repeat(len(pieces) or 1) if size is None else (draw.randint(1, size) for _ in itertools.count())
    parsed = parse(
        format_of(case),
        groups(pieces, iter(sizes)),
        tools={tool["function"]["name"]: tool["function"].get("parameters") for tool in case["tools"]},
        tokens=token_texts(case, family),
        reasons=opened_reasoning(case, family),
        is_cut="truncated" in case["tags"],
        **settings,
    )
    calls = tuple(ParsedToolCall(*call) for call in parsed.calls)
    return ParseResult(content=parsed.content or None, reasoning_content=parsed.reasoning or None, tool_calls=calls)


def failures(*, whole_calls: bool) -> dict[str, str]:
    """Returns what the judge says of each output that does not pass, by its name."""
    found = {}
    for case, family in cases():
        pieces = tokens_of(case["raw_output"], token_texts(case, family), spelled(case))
        whole = result(case, family, pieces, None, 0, whole_calls=whole_calls)
        streams = {
            name: result(case, family, pieces, size, seed, whole_calls=whole_calls)
            for seed, (name, size) in enumerate(STREAMS.items())
        }
        rows = checks.run_checks(Fixture.from_dict(case), family, Observation(nonstream=whole, streams={"one": whole, **streams}))
        if checks.case_status(rows).value != "pass":
            found[case["id"]] = "; ".join(f"{row.check} {row.strategy} {row.detail}" for row in rows if row.status.value != "pass")
    return found


def test_outputs_that_are_not_cut_are_read_as_expected_in_any_pieces():
    found = failures(whole_calls=False)
    complete = {case["id"] for case, _ in cases() if "truncated" not in case["tags"]}
    wrong = {name: why for name, why in found.items() if name in complete}
    assert not wrong.keys() - EXPECTED_FAILURES.keys(), wrong
    assert len(complete) - len(wrong) >= GOAL


def test_with_whole_calls_no_call_that_was_cut_is_sent():
    found = failures(whole_calls=True)
    assert not found.keys() - EXPECTED_FAILURES.keys(), found
    assert len(cases()) - len(found) >= GOAL_OF_WHOLE_CALLS


@pytest.mark.parametrize("whole_calls", [False, True])
def test_pieces_change_nothing(whole_calls):
    """Not even in outputs that are cut, of which the judge expects no call at all."""
    for case, family in cases():
        pieces = tokens_of(case["raw_output"], token_texts(case, family), spelled(case))
        whole = result(case, family, pieces, None, 0, whole_calls=whole_calls)
        for size, seed in ((1, 0), (3, 1), (9, 2)):
            assert result(case, family, pieces, size, seed, whole_calls=whole_calls) == whole, case["id"]
