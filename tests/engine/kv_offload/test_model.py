"""Real models with tiers below the device: what comes back from them is what was computed, under any layout."""

import random
from pathlib import Path
from typing import Any

import pytest
from starling_engine.config import TiersConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import VARIANTS, VOCAB, write_checkpoint
from tests.engine.cores import core_for, run

MAX_MODEL_LEN = 320
STEPS = 12
MIB = 1 << 20
Outputs = dict[str, list[int]]


def prompts() -> list[list[int]]:
    """Six that share beginnings, of up to 280 tokens."""
    rng = random.Random(3)
    shared = rng.choices(range(VOCAB), k=150)
    return [shared[: 150 - 20 * i] + rng.choices(range(VOCAB), k=60 + 14 * i) for i in range(6)]


def requests() -> list[EngineRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    return [EngineRequest(id=str(i), prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts())]


def core_with(folder: Path, tiers: TiersConfig | None, **settings: Any) -> Any:
    return core_for(folder, max_model_len=MAX_MODEL_LEN, tiers=tiers, **settings)


def serve(core: EngineCore) -> Outputs:
    results = run(core, requests())
    assert all(error is None for _, error in results.values())
    return {name: tokens for name, (tokens, _) in results.items()}


def assert_found(core: EngineCore) -> None:
    """Of every prompt two chunks at least were found; what one has loaded, another finds on the device."""
    stats = core.scheduler.stats
    assert stats.external_hits_total >= 128 and stats.external_hits_total + stats.prefix_hits_total >= 6 * 128


@pytest.fixture(scope="module", params=["llama3.1", "qwen3-mixed", "deepseek-v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outputs]:
    """A model, and what it answers without tiers."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, VARIANTS[request.param])
    with core_with(folder, None) as core:
        return folder, serve(core)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_in_a_small_cache_with_a_cpu_tier(checkpoint: tuple[Path, Outputs], policy: Any) -> None:
    folder, expected = checkpoint
    tiers = TiersConfig(cpu_bytes=4 * MIB, cpu_policy=policy)
    with core_with(folder, tiers, kv_blocks=80) as core:
        for _ in range(3):
            assert serve(core) == expected
            core.scheduler.kv.pool.evict_free_blocks()
        cpu = core.scheduler.snapshot().tiers["cpu"]
        assert cpu.hits_total and cpu.stored_bytes_total and cpu.loaded_bytes_total


def test_other_layouts_find_what_one_rank_left_in_a_folder(checkpoint: tuple[Path, Outputs], tmp_path: Path) -> None:
    folder, expected = checkpoint
    tiers = TiersConfig(cpu_bytes=4 * MIB, fs_path=str(tmp_path / "kv"), fs_bytes=64 * MIB)
    with core_with(folder, tiers, block_size=16) as core:
        assert serve(core) == expected
    for layout in (ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout()):
        with core_with(folder, tiers, layout=layout) as core:
            assert serve(core) == expected
            assert_found(core)


def test_one_rank_finds_what_other_layouts_left(checkpoint: tuple[Path, Outputs], tmp_path: Path) -> None:
    folder, expected = checkpoint
    tiers = TiersConfig(cpu_bytes=4 * MIB, fs_path=str(tmp_path / "kv"), fs_bytes=64 * MIB)
    with core_with(folder, tiers, layout=ParallelLayout(pipeline=2, tensor=2)) as core:
        assert serve(core) == expected
    with core_with(folder, tiers, block_size=32) as core:
        assert serve(core) == expected
        assert_found(core)


def test_a_damaged_folder_is_computed_again(checkpoint: tuple[Path, Outputs], tmp_path: Path) -> None:
    folder, expected = checkpoint
    tiers = TiersConfig(cpu_bytes=4 * MIB, fs_path=str(tmp_path / "kv"), fs_bytes=64 * MIB)
    with core_with(folder, tiers) as core:
        assert serve(core) == expected
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        content[4096] ^= 1
        path.write_bytes(content)
    with core_with(folder, tiers) as core:
        assert serve(core) == expected
        assert core.scheduler.snapshot().tiers["filesystem"].corrupt_total
