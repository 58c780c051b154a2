"""The engine core over DeepSeek-V4, against transformers: rows of windows and entries of runs in chunks, hits, tiers, layouts.

What indexers have in common is compared by `test_indexers_in_core.py`, in `make test-all` for this one, too.
"""

from pathlib import Path

import pytest
from starling_engine.config import TiersConfig

from tests.engine.checkpoints import FAMILIES
from tests.engine.core.test_indexers_in_core import LAYOUTS, Sparse, answers_of
from tests.engine.cores import core_for, run


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return answers_of("deepseek-v4", FAMILIES["deepseek-v4"], tmp_path_factory.mktemp("checkpoint"))


def test_four_at_once_under_pressure(compressed: Sparse) -> None:
    """There is room for one request and the prompt of another, which is preempted."""
    with core_for(compressed.folder, kv_blocks=42, budget=16, max_model_len=192) as core:
        results = run(core, [compressed.request(str(i), cache_salt=str(i)) for i in range(4)])
        assert core.scheduler.stats.preemptions_total > 0
        assert all(found == (compressed.tokens, None) for found in results.values())


def test_an_engine_of_another_layout_finds_rows_and_entries_in_a_folder(compressed: Sparse, tmp_path: Path) -> None:
    """A hit ends within the longer runs, of which rows of the window have the rest."""
    tiers = TiersConfig(cpu_bytes=16 << 20, fs_path=str(tmp_path / "kv"), fs_bytes=64 << 20)
    for number, name in enumerate(("pipeline", "tensor")):
        with core_for(compressed.folder, max_model_len=256, tiers=tiers, **LAYOUTS[name]) as core:
            for turn in range(1 + number):
                assert run(core, [compressed.request(str(turn))])[str(turn)] == (compressed.tokens, None)
            assert core.scheduler.stats.external_hits_total == 128 * number
            assert core.scheduler.stats.prefix_hits_total == 144 * number
