"""The engine core over models with an indexer, against transformers: chunks, hits, preemption, tiers, layouts, and a device."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine.config import SpeculativeConfig, TiersConfig
from starling_engine.params import SamplingParams
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import FAMILIES, VOCAB, Variant, edit_json, write_checkpoint
from tests.engine.cores import core_for, run

LENGTH, STEPS = 150, 40
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"layout": ParallelLayout(tensor=2)},
    "pipeline": {"layout": ParallelLayout(pipeline=2)},
    "experts": {"layout": ParallelLayout(tensor=2), "expert_parallel": True},
}


@dataclass(frozen=True)
class Sparse:
    name: str
    folder: Path
    prompt: list[int]
    tokens: list[int]

    def request(self, name: str, **fields: object) -> EngineRequest:
        params = SamplingParams(temperature=0.0, max_tokens=len(self.tokens), ignore_eos=True)
        return EngineRequest(id=name, prompt_ids=self.prompt, params=params, **fields)


def answers_of(name: str, variant: Variant, folder: Path, **settings: Any) -> Sparse:
    """Writes a checkpoint, and asks transformers, whose `generate` takes `settings`."""
    model = write_checkpoint(folder, variant)
    prompt = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model.generate(prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, **settings)[0]
    return Sparse(name, folder, prompt[0].tolist(), whole[LENGTH:].tolist())


@pytest.fixture(
    scope="module", params=[*(pytest.param(each, marks=pytest.mark.whole) for each in ("deepseek-v3.2", "deepseek-v4")), "glm-5.2"]
)
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return answers_of(request.param, FAMILIES[request.param], tmp_path_factory.mktemp("checkpoint"))


def test_the_choice_decides_what_is_answered(sparse: Sparse, tmp_path: Path) -> None:
    """Without it, what follows in this file would show nothing."""
    shutil.copytree(sparse.folder, tmp_path / "whole")
    edit_json(tmp_path / "whole" / "config.json", {"index_topk": 4096})
    with core_for(tmp_path / "whole", max_model_len=256) as core:
        assert run(core, [sparse.request("whole")])["whole"][0][:5] != sparse.tokens[:5]


@pytest.mark.parametrize("has_tiers", [False, True])
def test_many_at_once_under_pressure(has_tiers: bool, sparse: Sparse, tmp_path: Path) -> None:
    """Index keys are where their latents are: in chunks, with hits and preemptions."""
    tiers = TiersConfig(cpu_bytes=16 << 20, fs_path=str(tmp_path / "kv"), fs_bytes=64 << 20) if has_tiers else None
    if sparse.name == "deepseek-v4":
        pytest.skip("it has other groups, and a test of its own")
    with core_for(sparse.folder, kv_blocks=64, budget=48, max_model_len=256, tiers=tiers) as core:
        results = run(core, [sparse.request(str(i), cache_salt=str(i % 2)) for i in range(4)])
        assert core.scheduler.stats.preemptions_total > 0
        assert all(found == (sparse.tokens, None) for found in results.values())
        before = core.scheduler.stats.prefix_hits_total
        if has_tiers:
            core.scheduler.reset_device_cache()
        assert run(core, [sparse.request("again", cache_salt="0")])["again"] == (sparse.tokens, None)
        hits = core.scheduler.stats.prefix_hits_total - before
        assert core.scheduler.snapshot().tiers["cpu"].loaded_bytes_total if has_tiers else hits


def test_an_engine_of_another_layout_finds_index_keys_in_a_folder(sparse: Sparse, tmp_path: Path) -> None:
    tiers = TiersConfig(cpu_bytes=16 << 20, fs_path=str(tmp_path / "kv"), fs_bytes=64 << 20)
    for number, name in enumerate(("pipeline", "tensor")):
        with core_for(sparse.folder, max_model_len=256, tiers=tiers, **LAYOUTS[name]) as core:
            assert run(core, [sparse.request("a")])["a"] == (sparse.tokens, None)
            assert core.scheduler.stats.external_hits_total == 128 * number


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_choose_the_same_tokens(name: str, sparse: Sparse) -> None:
    with core_for(sparse.folder, max_model_len=256, **LAYOUTS[name]) as core:
        for turn in range(2):
            assert run(core, [sparse.request(str(turn))])[str(turn)] == (sparse.tokens, None)
        assert core.scheduler.stats.prefix_hits_total == 144


def test_drafts_are_checked_by_tokens_of_their_own_choice(sparse: Sparse) -> None:
    """Several tokens of a sequence in one step, each with other tokens to attend to; every seventh draft is wrong."""
    expected = [token if at % 7 else (token + 1) % VOCAB for at, token in enumerate(sparse.tokens, start=1)]
    drafting = SpeculativeConfig(num_speculative_tokens=3, method="ngram")
    with core_for(sparse.folder, max_model_len=256, speculative=drafting) as core:
        assert run(core, [sparse.request("a", prediction_ids=expected)])["a"] == (sparse.tokens, None)
        stats = core.scheduler.stats
        assert 10 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total


def test_a_device_has_indexers_too(sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are planned ahead, and other kernels are Triton's; attention is torch's."""
    if sparse.name == "deepseek-v3.2":
        pytest.skip("the interpreter takes long; GLM's have all that DeepSeek's have")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    requests = [EngineRequest(id=str(length), prompt_ids=sparse.prompt[-length:], params=params) for length in (3, 20)]
    with core_for(sparse.folder) as core:
        expected = run(core, requests)
    monkeypatch.setenv(INTERPRETED, "1")
    with core_for(sparse.folder, device="interpreter", budget=16) as core:
        for _ in range(2):
            assert run(core, requests) == expected
