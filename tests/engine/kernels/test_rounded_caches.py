"""The path of a GPU with a cache in fewer bits, in the interpreter: as transformers with one that rounds, and as a CPU's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starling_engine.config import CacheType, TiersConfig
from starling_engine.native.cache_rows import FP8, INT4, INT8
from starling_engine.params import SamplingParams
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.weights.cache_scales import load_kv_scales

from tests.engine.checkpoints import PROMPT, VARIANTS, VOCAB, write_checkpoint
from tests.engine.cores import core_for, run
from tests.engine.models.test_decoder import build
from tests.engine.paged_driver import PagedDriver
from tests.engine.rounding_caches import FAR, ONES, SCALES, Scales, assert_near, cache_reference

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these put their tensors on the CPU, and the kernels are compiled here"
)

STEPS = 4
MIB = 1 << 20


CASES = {
    "ones": ("qwen3-mixed", ONES, FP8),
    "scales": ("llama3.1", SCALES, FP8),
    "int8": ("qwen3", ONES, INT8),
    "int4": ("qwen3", ONES, INT4),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if "int" in case else pytest.mark.whole) for case in CASES])
def test_logits_equal_those_of_a_cache_that_rounds(case: str, tmp_path: Path) -> None:
    from starling_engine.attention.triton_paged import TritonAttention

    name, scales, cache = CASES[case]
    reference, plain = cache_reference(tmp_path, name, scales, cache)
    model = build(reference, TritonAttention())
    load_kv_scales(model.kv_scaled, tmp_path)
    driver = PagedDriver(model, cache, block_size=16)
    pieces = [reference.prompt[:23], reference.prompt[23:], *([token] for token in reference.tokens[:STEPS])]
    found = torch.cat([driver.run([(0, piece)])[0] for piece in pieces])
    assert_near(found, reference.logits[: len(found)], plain[: len(found)], far=FAR / 10 if cache == INT8 else FAR)


@pytest.mark.parametrize(
    ("name", "scales", "kind", "cache"),
    [
        pytest.param("llama3.1", SCALES, "fp8", FP8, id="fp8", marks=pytest.mark.whole),
        pytest.param("qwen3", ONES, "int4", INT4, id="int4", marks=pytest.mark.whole),
    ],
)
def test_an_engine_answers_as_transformers(
    name: str, scales: Scales, kind: CacheType, cache: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are recorded and replayed with the scales of the checkpoint; those of one request have drafts."""
    monkeypatch.setenv(INTERPRETED, "1")
    reference, _ = cache_reference(tmp_path, name, scales, cache)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with core_for(tmp_path, device="interpreter", kv_cache=kind, budget=32) as core:
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


def test_what_a_cpu_leaves_in_a_tier_a_gpu_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have a window. The other device computes the prompt's last tokens, and the answer."""
    mixed, prompt = VARIANTS["qwen3-mixed"], [n % VOCAB for n in range(7, 7 + 130)]
    write_checkpoint(tmp_path / "model", replace(mixed, changes={**mixed.changes, "head_dim": 32}))
    tiers = TiersConfig(cpu_bytes=4 * MIB, fs_path=str(tmp_path / "kv"), fs_bytes=64 * MIB)
    request = EngineRequest(id="0", prompt_ids=prompt, params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    settings = {"tiers": tiers, "kv_cache": "int4", "max_model_len": 160, "budget": 16}
    with core_for(tmp_path / "model", **settings) as core:
        expected = run(core, [request])
    monkeypatch.setenv(INTERPRETED, "1")
    with core_for(tmp_path / "model", **settings, device="interpreter", enforce_eager=True) as core:
        assert run(core, [request]) == expected
        assert core.scheduler.stats.external_hits_total == 128
