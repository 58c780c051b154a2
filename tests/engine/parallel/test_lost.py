"""A rank that dies, hangs, or never comes: the others end, and the error says which it was."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from starling_engine import SamplingParams
from starling_engine.errors import ConfigError, DeviceLost, EngineDead, RankLost, WeightError
from starling_engine.executor.processes import ProcessExecutor
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import PROMPT, VARIANTS, write_checkpoint
from tests.engine.cores import core_for, greedy, run
from tests.engine.real_engine import running
from tests.fork_server import forks_of

TP2 = ParallelLayout(tensor=2)
TOKENS = list(range(PROMPT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, VARIANTS["qwen3"])
    return folder


def pids(executor: Any) -> list[int]:
    assert isinstance(executor, ProcessExecutor)
    return [process.pid for process in executor._health.processes]


@pytest.mark.parametrize("layout", [TP2, ParallelLayout(pipeline=2)], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "said"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "made no progress for 2 s")], ids=["dies", "hangs"]
)
def test_a_rank_that_dies_or_hangs_is_named(
    folder: Path, layout: ParallelLayout, rank: int, how: signal.Signals, said: str
) -> None:
    with core_for(folder, layout=layout, patience=2.0) as core:
        assert core.add(greedy("long", TOKENS)) is None
        for _ in range(3):
            core.step()
        own = pids(core.executor)
        os.kill(own[rank], how)
        began = time.monotonic()
        with pytest.raises(RankLost, match=rf"^rank {rank} .*{said}"):
            while True:
                core.step()
        assert time.monotonic() - began < 30
    for pid in own:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("layout", [TP2, ParallelLayout(pipeline=2)], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_step_that_fails_on_one_rank_ends_the_group(
    folder: Path, layout: ParallelLayout, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exchanges no longer match the others': to go on would give wrong tokens without a word."""
    check_failing(folder, layout, victim, monkeypatch, "tests.engine.parallel.failing_worker", str(victim))


@pytest.mark.parametrize("victim", [0, 1])
def test_so_does_one_that_fails_while_the_next_is_launched(folder: Path, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_failing(folder, TP2, victim, monkeypatch, "tests.engine.parallel.late_worker", f"fails-{victim}")


def check_failing(folder: Path, layout: ParallelLayout, victim: int, monkeypatch: pytest.MonkeyPatch, *worker: str) -> None:
    """Runs four requests, so that other steps are in flight: tokens before the end are those of a run without a failure."""
    prompts = [TOKENS[:length] for length in (5, 9, 14, 20)]
    requests = [greedy(str(number), prompt) for number, prompt in enumerate(prompts)]
    with core_for(folder) as core:
        expected = {name: tokens for name, (tokens, _) in run(core, requests).items()}
    monkeypatch.setattr("starling_engine.executor.processes.WORKER", worker)
    with core_for(folder, layout=layout, patience=20.0) as core:
        for request in requests:
            assert core.add(request) is None
        published: dict[str, list[int]] = {request.id: [] for request in requests}
        began = time.monotonic()
        with pytest.raises(RankLost, match=rf"^rank {victim} failed at step \d+, and not all others did: MemoryError"):
            while core.has_work:
                for delta in core.step():
                    published[delta.id] += delta.tokens
        assert time.monotonic() - began < 30
    assert 0 < sum(map(len, published.values())) < sum(map(len, expected.values()))
    assert all(expected[name][: len(tokens)] == tokens for name, tokens in published.items())


def test_a_device_that_breaks_behind_its_host_ends_the_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ("tests.engine.parallel.late_worker", "breaks")
    monkeypatch.setattr("starling_engine.executor.processes.WORKER", worker)
    with core_for(folder, layout=TP2, patience=20.0) as core:
        assert core.add(greedy("long", TOKENS)) is None
        with pytest.raises(DeviceLost, match=r"^the device of rank 1 failed: CUDA error: an illegal memory access"):
            while core.has_work:
                core.step()


def test_what_one_rank_cannot_load_is_said(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3"])
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(WeightError, match="damaged"), core_for(tmp_path, layout=TP2):
        pass


async def test_streams_hear_which_rank_it_was() -> None:
    async with running(tensor_parallel_size=2) as engine:
        stream = engine.stream(TOKENS, SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
        await anext(stream)
        os.kill([*forks_of(engine.cores.processes[0].pid)][1], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
            async for _ in stream:
                pass


async def test_a_rank_that_dies_while_nothing_runs_is_noticed_too() -> None:
    async with running(tensor_parallel_size=2) as engine:
        os.kill([*forks_of(engine.cores.processes[0].pid)][1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:
            try:
                engine.check_health()
            except EngineDead as error:
                assert "rank 1 (process" in str(error)
                return
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


@pytest.mark.usefixtures("programs")
async def test_ranks_end_with_their_core() -> None:
    """Also one that is stopped, and could not see that its parent is gone."""
    async with running(tensor_parallel_size=2) as engine:
        core = engine.cores.processes[0].pid
        ranks = _child_ranks(core)
        assert not _holds_torch(core) and all(map(_holds_torch, ranks)), "it would take the core seconds and memory to load"
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(core, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while any(_is_there(pid) for pid in ranks):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_a_layout_that_the_model_does_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: 3 ranks cannot share this model"):
        async with running(tensor_parallel_size=3):
            pass


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _holds_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def _child_ranks(core: int) -> list[int]:
    """Worker processes of a core, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == core and b"starling_engine.worker" in command:
            found[int(command[-2])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]
