"""Whatever a model samples under the schemas of usual types, at temperature 1, is valid for a validator that is not ours."""

import asyncio
import json
import math
from typing import Any

import jsonschema_rs
import pytest
from starling_engine import SamplingParams
from starling_engine.outputs import RequestOutput
from starling_engine.params import StructuredOutputsParams

from tests.engine.real_engine import running
from tests.engine.structured_output.test_usual_types import IN_WORDS_OF_2020_12, REFUSED, SCHEMAS

TYPES = [name for name in SCHEMAS if name not in REFUSED]
BOUNDED = {"bool", "None", "Enum", "IntEnum", "Literal", "set of an enum", "date", "UUID"}
"""Types whose longest value fits `MAX_TOKENS`, white space included."""
MAX_TOKENS = 300
SEEDS = [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.whole) for seed in range(20)]


def finite(text: str) -> float:
    """Returns a number, or one that is nearly as large as floats become: JSON has no limit, but the judge wants floats."""
    number = float(text)
    return number if math.isfinite(number) else math.copysign(1e308, number)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
async def test_what_is_sampled_is_valid(seed: int) -> None:
    async with running(max_num_seqs=64, num_threads=2) as engine:

        async def ask(name: str) -> RequestOutput:
            form = StructuredOutputsParams(json=SCHEMAS[name][0], disable_any_whitespace=seed % 2 == 1)
            params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed, structured_outputs=form)
            return await engine.complete(f"Example {seed} of {name}: ", params)

        outputs = await asyncio.gather(*(ask(name) for name in TYPES))
        assert engine.stats.jump_forward_tokens_total
    ended = 0
    for name, output in zip(TYPES, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason in ("stop", "length")
        assert completion.finish_reason == "stop" or name not in BOUNDED, (name, completion.text)
        if completion.finish_reason == "stop":
            ended += 1
            value: Any = json.loads(completion.text, parse_float=finite)
            judge = jsonschema_rs.Draft202012Validator(IN_WORDS_OF_2020_12.get(name, SCHEMAS[name][0]), validate_formats=True)
            assert judge.is_valid(value), (name, completion.text)
    assert ended > len(TYPES) / 2
