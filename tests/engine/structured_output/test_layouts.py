"""Grammars give the same tokens in each layout, with drafts and without, greedy and sampled, in float32."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.params import StructuredOutputsParams

from tests.engine.real_engine import running
from tests.engine.spec_decode.test_layouts import LAYOUTS, PLAIN

pytestmark = pytest.mark.timeout(180)
MODELS = Path(__file__).parents[3] / "models"
RANDOM, TRAINED = "starling-random-moe", "starling-pydoc"
SETTINGS: dict[str, Any] = {**PLAIN, "max_model_len": 512}
KV_SCALE = {RANDOM: 1, TRAINED: 6}
"""Bytes of a token's keys and values, over those of the random one."""
USUAL = ("alone", "pipeline", "experts")
"""Layouts of every run. The others are in a whole one, with a trained model too, whose answers are too short to be preempted."""
FORMS: list[StructuredOutputsParams | None] = [
    StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {"return_value": {"type": "integer"}, "kinds": {"type": "array", "items": {"enum": ["alpha", "beta"]}}},
            "required": ["return_value", "kinds"],
            "additionalProperties": False,
        },
        disable_any_whitespace=True,
    ),
    StructuredOutputsParams(regex=r"(def|class) [a-z_]{3,30}\(\): (pass|return [0-9]{1,20})"),
    StructuredOutputsParams(choice=["the first of them", "the second of them"]),
    StructuredOutputsParams(grammar='root ::= "Returns " ("a list" | "the number") " of " [a-z]{2,12} "."'),
    None,
]
STOP = ("e", "an")
"""A draft may have what ends a text without a form, and tokens behind it."""


async def answers(engine: AsyncEngine, *, speculative: bool) -> list[tuple[list[int], str | None]]:
    """Returns the tokens and finish reasons of each form: greedy, and sampled with penalties."""
    asked = []
    for number, form in enumerate(FORMS * 2):
        kind: dict[str, Any] = {"temperature": 0.0} if number < len(FORMS) else {"temperature": 1.0, "presence_penalty": 0.5}
        stop = STOP if form is None else ()
        params = SamplingParams(
            max_tokens=80,
            seed=number,
            speculative=speculative,
            structured_outputs=form,
            stop=[*stop],
            min_tokens=5 * len(stop),
            **kind,
        )
        asked.append(engine.complete(f"Example {number} of lists, tuples and dictionaries: ", params))
    outputs = [output.outputs[0] for output in await asyncio.gather(*asked)]
    return [(list(output.token_ids), output.finish_reason) for output in outputs]


@cache
def expected(model: str) -> list[tuple[list[int], str | None]]:
    """Returns what one rank answers without drafts, with memory for all."""

    async def ask() -> list[tuple[list[int], str | None]]:
        async with running(**SETTINGS, model=str(MODELS / model)) as engine:
            found = await answers(engine, speculative=False)
            assert not engine.stats.jump_forward_tokens_total
            return found

    return asyncio.run(ask())


CASES = [
    pytest.param(model, layout, marks=() if (model, layout) in [(RANDOM, name) for name in USUAL] else pytest.mark.whole)
    for model, layouts in ((RANDOM, LAYOUTS), (TRAINED, LAYOUTS.keys() - {"experts", "preemption"}))
    for layout in sorted(layouts)
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_tokens_are_those_of_one_rank_without_drafts(model: str, layout: str) -> None:
    async def compare() -> None:
        settings = {**SETTINGS, **LAYOUTS[layout]}
        settings["kv_cache_memory_bytes"] *= KV_SCALE[model]
        async with running(**settings, model=str(MODELS / model), spec_method="ngram", spec_tokens=4) as engine:
            for _ in range(2):  # then with known grammars, so all at once, and cached prompts
                assert await answers(engine, speculative=True) == wanted
            assert engine.stats.jump_forward_tokens_total
            assert engine.stats.preemptions_total or layout != "preemption"

    wanted = expected(model)
    asyncio.run(compare())
