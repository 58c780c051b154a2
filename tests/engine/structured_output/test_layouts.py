"""Grammars give the same tokens in each layout, with drafts and without, greedy and sampled, in float32."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.params import StructuredOutputsParams

from tests.engine.real_engine import running
from tests.engine.spec_decode.test_layouts import LAYOUTS, PLAIN

pytestmark = pytest.mark.timeout(180)
MODEL = str(Path(__file__).parents[3] / "models" / "starling-random-moe")
SETTINGS: dict[str, Any] = {**PLAIN, "model": MODEL, "max_model_len": 512}
USUAL = ("alone", "pipeline", "experts")
"""Layouts of every run; the others are in a whole one."""
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
    None,
]


async def answers(engine: AsyncEngine, *, speculative: bool) -> list[tuple[list[int], str | None]]:
    """Returns the tokens and finish reasons of each form: greedy, and sampled with penalties."""
    asked = []
    for number, form in enumerate(FORMS * 2):
        kind: dict[str, Any] = {"temperature": 0.0} if number < len(FORMS) else {"temperature": 1.0, "presence_penalty": 0.5}
        params = SamplingParams(max_tokens=80, seed=number, speculative=speculative, structured_outputs=form, **kind)
        asked.append(engine.complete(f"Example {number}: ", params))
    outputs = [output.outputs[0] for output in await asyncio.gather(*asked)]
    return [(list(output.token_ids), output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], str | None]]:
    async def ask() -> list[tuple[list[int], str | None]]:
        async with running(**SETTINGS) as engine:
            found = await answers(engine, speculative=False)
            assert not engine.stats.jump_forward_tokens_total
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize("layout", [name if name in USUAL else pytest.param(name, marks=pytest.mark.whole) for name in LAYOUTS])
async def test_tokens_are_those_of_one_rank_without_drafts(layout: str, expected: list[tuple[list[int], str | None]]) -> None:
    settings = {**SETTINGS, **LAYOUTS[layout]}
    async with running(**settings, spec_method="ngram", spec_tokens=4) as engine:
        assert await answers(engine, speculative=True) == expected
        assert engine.stats.jump_forward_tokens_total
