"""The engine core over Llama 4 in contexts of several chunks, against transformers: chunks, hits, preemption, tiers, layouts."""

from dataclasses import replace
from pathlib import Path

import pytest
from starling_engine.args import EngineArgs
from starling_engine.config import TiersConfig
from starling_engine.errors import ConfigError
from starling_engine.frontend.resolve import resolve
from starling_engine.kv.spec import ChunkedLocalSpec

from tests.engine.checkpoints import FAMILIES, edit_json, write_servable
from tests.engine.core.test_indexers_in_core import LAYOUTS, LENGTH, Sparse, answers_of
from tests.engine.cores import core_for, run

CHUNK = 32
LLAMA4 = replace(FAMILIES["llama4"], changes={**FAMILIES["llama4"].changes, "attention_chunk_size": CHUNK})


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return answers_of("llama4", LLAMA4, tmp_path_factory.mktemp("checkpoint"), use_cache=False)


def test_a_sequence_of_several_chunks_holds_the_blocks_of_one(chunked: Sparse, tmp_path: Path) -> None:
    """Steps would be longer than a chunk, but end with it; and chunks decide what is answered."""
    assert len(chunked.tokens) > CHUNK < LENGTH
    with core_for(chunked.folder, max_model_len=256) as core:
        groups, most = core.scheduler.kv.groups, 0
        assert core.add(chunked.request("a")) is None
        tokens: list[int] = []
        while core.has_work:
            tokens += [token for delta in core.step() for token in delta.tokens]
            for request in core.scheduler.running:
                tables = zip(groups, request.blocks.tables, strict=True)
                held = [sum(map(bool, table)) for group, table in tables if isinstance(group.spec, ChunkedLocalSpec)]
                most = max(most, *held)
        assert tokens == chunked.tokens and 0 < most <= (CHUNK + 64) // 8
    whole = tmp_path / "whole"
    answers_of("llama4", replace(LLAMA4, changes={**LLAMA4.changes, "attention_chunk_size": 256}), whole)
    with core_for(whole, max_model_len=256) as core:
        assert run(core, [chunked.request("a")])["a"][0] != chunked.tokens


@pytest.mark.parametrize("has_tiers", [False, True])
def test_hits_preemption_and_tiers(has_tiers: bool, chunked: Sparse, tmp_path: Path) -> None:
    tiers = TiersConfig(cpu_bytes=16 << 20, fs_path=str(tmp_path / "kv"), fs_bytes=64 << 20) if has_tiers else None
    with core_for(chunked.folder, kv_blocks=40, budget=48, max_model_len=192, tiers=tiers) as core:
        results = run(core, [chunked.request(str(i), cache_salt=str(i)) for i in range(4)])
        assert core.scheduler.stats.preemptions_total > 0
        assert all(found == (chunked.tokens, None) for found in results.values())
        before = core.scheduler.stats.prefix_hits_total
        if has_tiers:
            core.scheduler.reset_device_cache()
        assert run(core, [chunked.request("again", cache_salt="3")])["again"] == (chunked.tokens, None)
        hits = core.scheduler.stats.prefix_hits_total - before
        assert core.scheduler.snapshot().tiers["cpu"].loaded_bytes_total if has_tiers else hits


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_attend_in_the_same_chunks(name: str, chunked: Sparse) -> None:
    with core_for(chunked.folder, max_model_len=256, **LAYOUTS[name]) as core:
        for turn in range(2):
            assert run(core, [chunked.request(str(turn))])[str(turn)] == (chunked.tokens, None)
        assert core.scheduler.stats.prefix_hits_total == 144


def test_the_longest_sequence_is_a_chunk_unless_more_is_asked_for(tmp_path: Path) -> None:
    write_servable(tmp_path, LLAMA4)
    assert resolve(EngineArgs(model=str(tmp_path)))[2].scheduler.max_model_len == CHUNK
    assert resolve(EngineArgs(model=str(tmp_path), max_model_len=128))[2].scheduler.max_model_len == 128
    edit_json(tmp_path / "config.json", {"attention_chunk_size": 24})
    with pytest.raises(ConfigError, match="must divide the 24 tokens of a chunk") as refusal:
        resolve(EngineArgs(model=str(tmp_path), block_size=16))
    assert refusal.value.field == "block_size"
