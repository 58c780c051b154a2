"""The path of a GPU with a cache in fp8, in the interpreter: as transformers with one that rounds keys and values."""

from pathlib import Path

import pytest
import torch
from starling_engine.native.cache_rows import FP8
from starling_engine.params import SamplingParams
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.weights.cache_scales import load_kv_scales

from tests.engine.checkpoints import PROMPT
from tests.engine.cores import core_for, run
from tests.engine.models.test_decoder import build
from tests.engine.paged_driver import PagedDriver
from tests.engine.rounding_caches import ONES, SCALES, Scales, assert_near, cache_reference

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these put their tensors on the CPU, and the kernels are compiled here"
)

STEPS = 4


@pytest.mark.parametrize(("name", "scales"), [("qwen3-mixed", ONES), ("llama3.1", SCALES)], ids=["ones", "scales"])
def test_logits_equal_those_of_a_cache_that_rounds(name: str, scales: Scales, tmp_path: Path) -> None:
    from starling_engine.attention.triton_paged import TritonAttention

    reference, plain = cache_reference(tmp_path, name, scales)
    model = build(reference, TritonAttention())
    load_kv_scales(model.kv_scaled, tmp_path)
    driver = PagedDriver(model, FP8, block_size=16)
    pieces = [reference.prompt[:23], reference.prompt[23:], *([token] for token in reference.tokens[:STEPS])]
    found = torch.cat([driver.run([(0, piece)])[0] for piece in pieces])
    assert_near(found, reference.logits[: len(found)], plain[: len(found)])


def test_an_engine_answers_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded and replayed with the scales of the checkpoint; those of one request have drafts."""
    monkeypatch.setenv(INTERPRETED, "1")
    reference, _ = cache_reference(tmp_path, "llama3.1", SCALES)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with core_for(tmp_path, device="interpreter", kv_cache="fp8", budget=32) as core:
        requests = [
            EngineRequest(id=str(n), prompt_ids=reference.prompt, params=params, prediction_ids=predicted)
            for n, predicted in enumerate(([], reference.tokens))
        ]
        answers = run(core, requests)
        assert core.scheduler.stats.spec_accepted_tokens_total > 0
    for tokens, error in answers.values():
        assert error is None
        assert tokens == reference.tokens[:STEPS]
    for step in range(STEPS):
        best, second = reference.logits[PROMPT + step - 1].topk(2).values.tolist()
        assert best - second > 0.05, "no tie that rounding could break"
