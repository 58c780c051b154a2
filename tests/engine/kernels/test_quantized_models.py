"""Whole models in codes on a GPU's path: the greedy tokens of their numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starling_engine.kernels import quantized_linear
from starling_engine.layers.experts_triton import TritonQuantizedExperts
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InterpretedPlatform
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.weights.quantized.writer import SCHEMES, quantize_checkpoint
from starling_engine.worker import worker

from tests.engine.checkpoints import WHOLE_BLOCKS, make_reference
from tests.engine.cores import core_for, run
from tests.engine.kernels.test_moe_models import spied

STEPS = 2


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="these put their tensors on the CPU, and the kernels are compiled here")
def test_greedy_tokens_are_those_of_the_dequantized_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers and experts in 4 bits, in float32, whose numbers are the same."""
    reference, path, found = make_reference(tmp_path / "plain", WHOLE_BLOCKS, torch.bfloat16), tmp_path / "codes", set[str]()
    quantize_checkpoint(tmp_path / "plain", path, replace(SCHEMES["W4A16"], group=32))
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    requests = [EngineRequest(id=str(n), prompt_ids=reference.prompt[:n], params=params) for n in (6, 2)]
    with core_for(path, enforce_eager=True) as core:
        expected = run(core, requests)
    monkeypatch.setenv(INTERPRETED, "1")
    monkeypatch.setattr(worker, "select_platform", lambda *_: InterpretedPlatform())
    monkeypatch.setattr(quantized_linear, "quantized_linear", spied(quantized_linear.quantized_linear, found))
    monkeypatch.setattr(TritonQuantizedExperts, "apply", spied(TritonQuantizedExperts.apply, found))
    with core_for(path, enforce_eager=True) as core:
        assert run(core, requests) == expected
    assert found == {"quantized_linear", "apply"}
