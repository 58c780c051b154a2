"""Chunks of a cache in fewer bits come back as they were, under other layouts too, and are never taken for those of another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starling_engine.config import CacheType, TiersConfig
from starling_engine.kv.layer_specs import kv_groups
from starling_engine.kv.spec import slab_bytes
from starling_engine.kv_offload.secondary.folder.inspect import list_models, verify
from starling_engine.kv_offload.secondary.parts import group_shares
from starling_engine.kv_offload.sizes import chunk_bytes, host_slots
from starling_engine.model_config.config import load_model_config
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import VARIANTS, write_checkpoint
from tests.engine.kv_offload.test_model import MIB, Outputs, assert_found, core_with, serve
from tests.engine.kv_offload.test_secondary_tiers import worker_of
from tests.engine.real_engine import MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    mixed = VARIANTS["qwen3-mixed"]
    write_checkpoint(folder, replace(mixed, changes={**mixed.changes, "head_dim": 32}))
    return folder


def answers(
    folder: Path, tiers: TiersConfig | None, *, kv_cache: CacheType | None, found: bool = False, **settings: Any
) -> Outputs:
    """Of six prompts; what of them was in the tiers is checked."""
    with core_with(folder, tiers, kv_cache=kv_cache, **settings) as core:
        outputs = serve(core)
        assert bool(core.scheduler.stats.external_hits_total) == found
        if found:
            assert_found(core)
        return outputs


@pytest.mark.parametrize(("kind", "name"), [("fp8", "float8_e4m3fn"), ("int8", "int8 (version 1)"), ("int4", "int4 (version 1)")])
def test_what_one_leaves_another_finds_unless_its_cache_is_of_another_type(
    kind: CacheType, name: str, folder: Path, tmp_path: Path
) -> None:
    tiers = TiersConfig(cpu_bytes=4 * MIB, fs_path=str(tmp_path), fs_bytes=64 * MIB)
    rounded, plain = answers(folder, None, kv_cache=kind), answers(folder, None, kv_cache=None)
    assert rounded != plain, "or this shows nothing"
    assert answers(folder, tiers, kv_cache=kind, block_size=16) == rounded
    assert answers(folder, tiers, kv_cache=None) == plain, "nothing was found"
    assert answers(folder, tiers, kv_cache=kind, found=True, layout=ParallelLayout(tensor=2)) == rounded
    assert answers(folder, tiers, kv_cache=None, found=True, block_size=16) == plain
    assert {model.dtype: model.objects > 0 for model in list_models(tmp_path)} == {
        "float32": True,
        f"{name} of float32": True,
    }
    assert all(fault is None for _, fault in verify(tmp_path))


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(pipeline=2, tensor=2)], ids=["one", "four"])
def test_what_counts_bytes_counts_a_quarter_of_float32_s(layout: ParallelLayout) -> None:
    wide = replace(worker_of(layout, 0), tiers=TiersConfig(cpu_bytes=4 * MIB))
    narrow, model = replace(wide, kv_cache="fp8"), load_model_config(Path(MODEL))
    assert slab_bytes(kv_groups(model, wide)) == 4 * slab_bytes(kv_groups(model, narrow))
    assert chunk_bytes(model, wide) == 4 * chunk_bytes(model, narrow)
    assert host_slots(model, wide) == host_slots(model, narrow) // 4
    for share, other in zip(group_shares(model, narrow), group_shares(model, wide), strict=True):
        assert share.covers == other.covers and 4 * share.run_bytes == other.run_bytes
