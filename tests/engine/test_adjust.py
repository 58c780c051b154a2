"""Changes to logits, against definitions written out and against transformers: on a host row by row, and as devices do it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.sampling.adjust import Adjuster, needs_adjusting
from starling_engine.worker.device.device_adjuster import DeviceAdjuster
from transformers.generation import logits_process

LOGITS = [2.0, -1.0, 0.5, 3.0, -2.0, 1.0]
EOS = (5,)
NEVER = float("-inf")
Adjusted = Callable[[SamplingParams, list[int], list[int]], list[float]]


def on_host(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    row = torch.tensor(LOGITS)
    Adjuster(params, len(prompt), EOS).adjust(row, np.array(prompt + output, np.int32))
    return row.tolist()


def when_entering(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The device gets the output with the request."""
    return on_device(params, prompt, output, len(output))


def when_counting(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The device samples the output itself."""
    return on_device(params, prompt, output, 0)


def on_device(params: SamplingParams, prompt: list[int], output: list[int], known: int) -> list[float]:
    """Adjusts in a slot that had another request before, beside other slots."""
    device, other = DeviceAdjuster(InlineQueue(), torch.device("cpu"), 3, len(LOGITS)), SamplingParams(logit_bias={2: 9.0})
    for slot in (1, 2):
        device.enter(slot, Adjuster(other, 1, EOS), [3, 3, 4])
    adjuster, slots = Adjuster(params, len(prompt), EOS), torch.tensor([2, 1])
    device.enter(1, adjuster, prompt + output[:known])
    for token in output[known:]:
        device.count(slots, torch.tensor([0, token]), torch.ones(2, dtype=torch.int32))
    logits = torch.stack([torch.zeros(6), torch.zeros(6), torch.tensor(LOGITS)])
    ends = torch.tensor([3, len(prompt + output)])
    rows = device.adjust(logits, torch.tensor([0, 2]), slots, ends, [Adjuster(other, 1, EOS), adjuster])
    assert rows[0].tolist() == [0.0, 0.0, 9.0, 0.0, 0.0, 0.0]
    return rows[1].tolist()


@pytest.fixture(params=[on_host, when_entering, when_counting])
def adjusted(request: pytest.FixtureRequest) -> Adjusted:
    def call(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
        assert needs_adjusting(params)
        found: list[float] = request.param(params, prompt, output)
        return found

    return call


def test_bias_and_bans(adjusted: Adjusted) -> None:
    assert adjusted(SamplingParams(logit_bias={1: 5.0, 4: -1.0}), [0], []) == [2.0, 4.0, 0.5, 3.0, -3.0, 1.0]
    assert adjusted(SamplingParams(banned_token_ids=[0, 3]), [0], []) == [NEVER, -1.0, 0.5, NEVER, -2.0, 1.0]
    assert adjusted(SamplingParams(allowed_token_ids=[1, 2]), [0], []) == [NEVER, -1.0, 0.5, NEVER, NEVER, NEVER]
    both = SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[2], logit_bias={1: 1.0, 2: 50.0, 3: 50.0})
    assert adjusted(both, [0], [1]) == [NEVER, 0.0, NEVER, NEVER, NEVER, NEVER]


def test_minimum_length_forbids_every_token_that_would_end(adjusted: Adjusted) -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    assert adjusted(params, [0], [1]) == [2.0, -1.0, 0.5, NEVER, -2.0, NEVER]
    assert adjusted(params, [0], [1, 2]) == LOGITS
    ignoring = SamplingParams(min_tokens=2, stop_token_ids=[3], ignore_eos=True)
    assert adjusted(ignoring, [0], [1]) == [2.0, -1.0, 0.5, NEVER, -2.0, 1.0]


def test_repetition_counts_prompt_and_output(adjusted: Adjusted) -> None:
    assert adjusted(SamplingParams(repetition_penalty=2.0), [0, 1], [3]) == [1.0, -2.0, 0.5, 1.5, -2.0, 1.0]


def test_presence_and_frequency_count_the_output(adjusted: Adjusted) -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(params, [0, 2], [3, 3, 1]) == [2.0, -1.75, 0.5, 2.0, -2.0, 1.0]


@pytest.mark.parametrize(
    ("params", "make"),
    [
        ({"repetition_penalty": 1.7}, lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.7)),
        ({"min_tokens": 3}, lambda: logits_process.MinNewTokensLengthLogitsProcessor(2, 3, [5], "cpu")),
        ({"banned_token_ids": [1, 4]}, lambda: logits_process.SuppressTokensLogitsProcessor([1, 4], "cpu")),
        ({"logit_bias": {0: -2.5, 5: 4.0}}, lambda: logits_process.SequenceBiasLogitsProcessor({(0,): -2.5, (5,): 4.0})),
    ],
)
def test_what_transformers_has_too_is_the_same(params: dict[str, Any], make: Callable[[], Any], adjusted: Adjusted) -> None:
    prompt, output = [4, 1], [3, 1, 0, 3]
    for length in range(len(output) + 1):
        ids = torch.tensor([prompt + output[:length]])
        expected = make()(ids, torch.tensor([LOGITS]))[0].tolist()
        assert adjusted(SamplingParams(**params), prompt, output[:length]) == pytest.approx(expected)
