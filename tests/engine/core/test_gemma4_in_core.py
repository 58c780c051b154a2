"""The engine core over Gemma 4, against transformers: layers that read another one's cache, and heads of two sizes."""

from pathlib import Path

import pytest
from starling_engine.config import TiersConfig
from starling_engine.errors import ConfigError
from starling_engine.model_config.config import load_model_config
from starling_engine.model_config.split import check_split
from starling_engine.params import SamplingParams
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import FAMILIES
from tests.engine.core.test_indexers_in_core import LAYOUTS, Sparse, answers_of
from tests.engine.cores import core_for, run


@pytest.fixture(scope="module", params=["gemma4-inputs", pytest.param("gemma4-moe", marks=pytest.mark.whole)])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return answers_of(request.param, FAMILIES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("has_tiers", [False, True])
def test_hits_preemption_and_tiers(has_tiers: bool, gemma: Sparse, tmp_path: Path) -> None:
    tiers = TiersConfig(cpu_bytes=16 << 20, fs_path=str(tmp_path / "kv"), fs_bytes=64 << 20) if has_tiers else None
    with core_for(gemma.folder, kv_blocks=34, budget=48, max_model_len=192, tiers=tiers) as core:
        results = run(core, [gemma.request(str(i), cache_salt=str(i % 2)) for i in range(4)])
        assert core.scheduler.stats.preemptions_total > 0
        assert all(found == (gemma.tokens, None) for found in results.values())
        before = core.scheduler.stats.prefix_hits_total
        if has_tiers:
            core.scheduler.reset_device_cache()
        for again in ("once", "twice"):
            assert run(core, [gemma.request(again, cache_salt="1")])[again] == (gemma.tokens, None)
        hits = core.scheduler.stats.prefix_hits_total - before
        assert core.scheduler.snapshot().tiers["cpu"].loaded_bytes_total if has_tiers else hits


def test_layers_of_a_kind_have_slabs_of_their_heads_and_readers_have_none(gemma: Sparse) -> None:
    with core_for(gemma.folder) as core:
        groups = core.scheduler.kv.groups
    held = {layer: (group.spec.num_kv_heads, group.spec.row_size) for group in groups for layer in group.layers}
    if gemma.name == "gemma4-moe":
        assert held == {0: (2, 32), 1: (2, 64), 2: (2, 32), 3: (2, 64)}
    else:
        assert held == {0: (1, 32), 1: (1, 64), 2: (1, 32)}
        assert {pair for group in groups for pair in group.readers} == {(3, 2), (4, 1)}


def test_ranks_have_heads_of_both_sizes(gemma: Sparse, tmp_path: Path) -> None:
    """One layout finds in a folder what another one has written."""
    tiers = TiersConfig(cpu_bytes=16 << 20, fs_path=str(tmp_path / "kv"), fs_bytes=64 << 20)
    with core_for(gemma.folder, max_model_len=256, tiers=tiers, **LAYOUTS["tensor"]) as core:
        assert run(core, [gemma.request("a")])["a"] == (gemma.tokens, None)
    with core_for(gemma.folder, max_model_len=256, tiers=tiers) as core:
        assert run(core, [gemma.request("a")])["a"] == (gemma.tokens, None)
        assert core.scheduler.stats.external_hits_total


def test_stages_have_layers_without_inputs_of_their_own(gemma: Sparse) -> None:
    model, layout = load_model_config(gemma.folder), ParallelLayout(pipeline=2)
    if model.traits.layer_inputs is not None:
        with pytest.raises(ConfigError, match="later stages do not know token ids") as refusal:
            check_split(model, layout)
        assert refusal.value.field == "pipeline_parallel_size"
        return
    with core_for(gemma.folder, max_model_len=256, layout=layout) as core:
        assert run(core, [gemma.request("a")])["a"] == (gemma.tokens, None)


def test_a_device_answers_the_same(gemma: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels are interpreted."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    requests = [EngineRequest(id=str(length), prompt_ids=gemma.prompt[-length:], params=params) for length in (3, 20)]
    with core_for(gemma.folder) as core:
        expected = run(core, requests)
    monkeypatch.setenv(INTERPRETED, "1")
    with core_for(gemma.folder, device="interpreter", budget=16) as core:
        assert run(core, requests) == expected
