"""Changes to logits, against their definitions written out."""

import numpy as np
import torch
from starling_engine.params import SamplingParams
from starling_engine.sampling.adjust import Adjuster, needs_adjusting

LOGITS = [2.0, -1.0, 0.5, 3.0, -2.0, 1.0]
EOS = (5,)
NEVER = float("-inf")


def adjusted(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    assert needs_adjusting(params)
    row = torch.tensor(LOGITS)
    Adjuster(params, len(prompt), EOS).adjust(row, np.array(prompt + output, np.int32))
    return row.tolist()


def test_bias_and_bans() -> None:
    assert adjusted(SamplingParams(logit_bias={1: 5.0, 4: -1.0}), [0], []) == [2.0, 4.0, 0.5, 3.0, -3.0, 1.0]
    assert adjusted(SamplingParams(banned_token_ids=[0, 3]), [0], []) == [NEVER, -1.0, 0.5, NEVER, -2.0, 1.0]
    assert adjusted(SamplingParams(allowed_token_ids=[1, 2]), [0], []) == [NEVER, -1.0, 0.5, NEVER, NEVER, NEVER]


def test_minimum_length_forbids_every_token_that_would_end() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    assert adjusted(params, [0], [1]) == [2.0, -1.0, 0.5, NEVER, -2.0, NEVER]
    assert adjusted(params, [0], [1, 2]) == LOGITS
    ignoring = SamplingParams(min_tokens=2, stop_token_ids=[3], ignore_eos=True)
    assert adjusted(ignoring, [0], [1]) == [2.0, -1.0, 0.5, NEVER, -2.0, 1.0]


def test_repetition_counts_prompt_and_output() -> None:
    assert adjusted(SamplingParams(repetition_penalty=2.0), [0, 1], [3]) == [1.0, -2.0, 0.5, 1.5, -2.0, 1.0]


def test_presence_and_frequency_count_the_output() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(params, [0, 2], [3, 3, 1]) == [2.0, -1.75, 0.5, 2.0, -2.0, 1.0]
