"""A core that ends first writes the chunks that it put off for its steps."""

import threading
import time
from pathlib import Path

import pytest
from starling_engine.config import TiersConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.kv_offload.secondary.tiers import SecondaryTiers
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest

from tests.engine.checkpoints import VARIANTS, write_checkpoint
from tests.engine.cores import core_for

CHUNKS = 4
PROMPTS = 8
ALL_PROMPTS = 400
"""Blocks that hold every prompt at once: on a smaller device chunks may be evicted before they are stored."""
MIB = 1 << 20
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, VARIANTS["llama3.1"])
    return folder


def tiers(folder: Path) -> TiersConfig:
    return TiersConfig(cpu_bytes=64 * MIB, fs_path=str(folder), fs_bytes=1 << 30)


def serve(core: EngineCore) -> None:
    prompts = [[3 + number, *(5 + at * 7 % 90 for at in range(CHUNKS * 64))] for number in range(PROMPTS)]
    for at, prompt in enumerate(prompts):
        assert core.add(EngineRequest(id=str(at), prompt_ids=prompt, params=PARAMS)) is None
    while core.has_work:
        assert all(delta.error is None for delta in core.step())


def files(folder: Path) -> int:
    return len(list(folder.rglob("*.kv")))


@pytest.mark.timeout(120)
def test_what_is_not_written_yet_is_written_at_the_end(checkpoint: Path, tmp_path: Path) -> None:
    with core_for(checkpoint, max_model_len=320, kv_blocks=ALL_PROMPTS, tiers=tiers(tmp_path)) as core:
        serve(core)
        core.leave(60)
    assert files(tmp_path) == PROMPTS * CHUNKS


@pytest.mark.timeout(120)
def test_a_tier_that_hangs_does_not_hold_the_end_up(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(SecondaryTiers, "write", lambda *_: go.wait(60))
    with core_for(checkpoint, max_model_len=320, tiers=tiers(tmp_path)) as core:
        serve(core)
        began = time.monotonic()
        core.leave(0.5)
        assert 0.5 <= time.monotonic() - began < 40
        go.set()


def test_who_has_nothing_to_write_ends_at_once(checkpoint: Path) -> None:
    with core_for(checkpoint) as core:
        began = time.monotonic()
        core.leave(60)
        assert time.monotonic() - began < 30
