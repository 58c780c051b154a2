"""Faults of a group: a rank dies or hangs, or a change is impossible, in each of its phases."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starling_engine import AsyncEngine
from starling_engine.elastic.coordinator import SizeChange, Stage
from starling_engine.errors import EngineDead, EpochFailed, OperationRunning
from starling_engine.executor.processes import STOP_SECONDS
from starling_engine.topology.epoch import CHECKPOINT, PEERS

from tests.engine.checkpoints import Reference
from tests.engine.cores import assert_greedy
from tests.engine.elastic.groups import Traffic, all_asleep, children, complete, group, worker_of
from tests.engine.real_engine import wait_until

PATIENCE = 5.0
"""Seconds; a busy machine keeps a rank from its step for some of them."""


def elastic(reference: Reference, **args: Any) -> contextlib.AbstractAsyncContextManager[AsyncEngine]:
    return group(reference, enable_elastic_ep=True, max_num_seqs=8, progress_timeout=PATIENCE, **args)


def at(stage: Stage, do: Callable[[], None]) -> Callable[[Stage], None]:
    return lambda entered: do() if entered == stage else None


def kill_last_core(engine: AsyncEngine) -> None:
    os.kill(engine.cores.processes[-1].pid, signal.SIGKILL)


def kill_last_worker(engine: AsyncEngine) -> None:
    os.kill(worker_of(engine, -1), signal.SIGKILL)


def stop_last_worker(engine: AsyncEngine) -> None:
    os.kill(worker_of(engine, -1), signal.SIGSTOP)


@contextlib.asynccontextmanager
async def unharmed(engine: AsyncEngine, reference: Reference) -> AsyncIterator[None]:
    """Asserts that the change which is tried in it failed, and that streams went on."""
    before, processes = engine.cores.membership, [process.pid for process in engine.cores.processes]
    known = children(os.getpid())
    traffic = Traffic(engine, reference, streams=2)
    await traffic.more(1)
    yield
    assert engine.cores.membership == before
    assert [process.pid for process in engine.cores.processes] == processes
    assert children(os.getpid()) == known
    engine.check_health()
    await traffic.more(2)
    await traffic.stop()


async def dead(engine: AsyncEngine, within: float) -> float:
    """Seconds until the engine says that it is."""
    began = time.monotonic()
    async with asyncio.timeout(within):
        while True:
            try:
                engine.check_health()
            except EngineDead:
                return time.monotonic() - began
            await asyncio.sleep(0.05)


def failures(engine: AsyncEngine) -> list[str]:
    """Returns the failures of the cores that have noticed."""
    return [client.failure for client in engine.cores.local.clients if client.failure is not None]


def assert_both_name(engine: AsyncEngine, core: str) -> None:
    """Asserts that cores which miss it name it: by what it does not do, or by its own last words."""
    assert all(core in failure for failure in failures(engine)), failures(engine)


# ---- before the commit ----


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    """One core with a checkpoint of its own: what comes to nothing leaves it as it was, so that each test finds it so."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(reference.folder, folder, dirs_exist_ok=True)
    async with elastic(replace(reference, folder=folder)) as engine:
        yield engine


@pytest.mark.asyncio(loop_scope="module")
async def test_joiners_that_die_while_they_load(serving: AsyncEngine, reference: Reference) -> None:
    async with unharmed(serving, reference):
        change = asyncio.create_task(serving.scale(2))
        await wait_until(lambda: len(serving.cores.processes) == 2)
        kill_last_core(serving)
        with pytest.raises(EpochFailed, match=r"engine core \d did not start: it was ended by SIGKILL"):
            await change
        change = asyncio.create_task(serving.scale(3))
        await wait_until(lambda: len(serving.cores.processes) == 3 and bool(children(serving.cores.processes[-1].pid)))
        kill_last_worker(serving)
        with pytest.raises(EpochFailed, match=r"engine core \d did not start: .*rank 0 \(process \d+\) was ended by SIGKILL"):
            await change


@pytest.mark.asyncio(loop_scope="module")
async def test_joiners_that_die_or_hang_in_prepare(serving: AsyncEngine, reference: Reference) -> None:
    async with unharmed(serving, reference):
        with pytest.raises(EpochFailed, match=r"engine core \d died: it was ended by SIGKILL"):
            await serving.scale(2, at("preparing", lambda: kill_last_core(serving)))
        with pytest.raises(EpochFailed, match=r"engine core \d died: .*rank 0 \(process \d+\) was ended by SIGKILL"):
            await serving.scale(2, at("preparing", lambda: kill_last_worker(serving)))
        preparing: list[float] = []

        def stop() -> None:
            stop_last_worker(serving)
            preparing.append(time.monotonic())

        with pytest.raises(EpochFailed, match=r"rank 0 of engine core \d+ did not get ready"):
            await serving.scale(2, at("preparing", stop))
        assert PATIENCE < time.monotonic() - preparing[0] < 2 * PATIENCE + STOP_SECONDS


@pytest.mark.asyncio(loop_scope="module")
async def test_experts_come_from_ranks_that_hold_them_where_the_files_are_gone(serving: AsyncEngine, reference: Reference) -> None:
    weights = Path(serving.config.worker.model_path) / "model.safetensors"
    away = weights.with_suffix(".away")
    assert serving.cores.coordinator is not None
    traffic = Traffic(serving, reference, streams=2)
    grow, shrink = SizeChange(2, at("preparing", lambda: weights.rename(away) and None)), SizeChange(1)
    for change in (grow, shrink):
        await serving.cores.coordinator.resize(change)
        await traffic.more(2)
        assert (change.loaded[PEERS].experts, change.loaded[CHECKPOINT].experts) == (3 * 4, 0), change
    away.rename(weights)
    await traffic.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_one_change_at_a_time_and_each_can_be_cancelled_until_its_commit(serving: AsyncEngine, reference: Reference) -> None:
    stages: tuple[Stage, ...] = ("waiting", "preparing")
    async with unharmed(serving, reference):
        for stage in stages:
            entered = asyncio.Event()
            change = asyncio.create_task(serving.scale(2, at(stage, entered.set)))
            await entered.wait()
            with pytest.raises(OperationRunning, match=f"a change from 1 to 2 engine cores is {stage}"):
                await serving.scale(3)
            change.cancel()
            with pytest.raises(asyncio.CancelledError):
                await change
    entered = asyncio.Event()
    change = asyncio.create_task(serving.scale(2, at("committing", entered.set)))
    await entered.wait()
    change.cancel()
    await change
    assert serving.cores.membership.layout.data == 2, "a commit that has begun is finished"
    assert_greedy(await complete(serving, reference), reference)
    await serving.scale(1)


async def test_a_serving_rank_that_dies_in_prepare_ends_the_group(reference: Reference) -> None:
    async with elastic(reference, data_parallel_size=2) as engine:
        traffic = Traffic(engine, reference)
        await traffic.more(1)
        lost = worker_of(engine, 1)
        with pytest.raises(EngineDead, match=r"engine core 1 died: .*rank 0 \(process \d+\) was ended by SIGKILL"):
            await engine.scale(3, at("preparing", lambda: os.kill(lost, signal.SIGKILL)))
        with pytest.raises(EngineDead, match="engine core 1 died"):
            engine.check_health()
        with pytest.raises(EngineDead, match="engine core 1 died"):
            await engine.scale(1)
        async with asyncio.timeout(3 * PATIENCE):
            errors = await traffic.failures()
        assert errors and all(isinstance(error, EngineDead) for error in errors)


async def test_a_serving_rank_that_hangs_in_prepare_while_all_sleep(reference: Reference) -> None:
    async with elastic(reference, data_parallel_size=2) as engine:
        hung = worker_of(engine, 0)
        await all_asleep(engine)
        async with asyncio.timeout(4 * PATIENCE):
            with pytest.raises(EngineDead, match=f"engine core 0 died: RankLost: rank 0 made no progress for {2 * PATIENCE:g} s"):
                await engine.scale(1, at("preparing", lambda: os.kill(hung, signal.SIGSTOP)))
        with pytest.raises(EngineDead, match="engine core 0 died"):
            engine.check_health()


# ---- in the commit, and after it ----


async def test_a_joiner_that_dies_in_the_commit(reference: Reference) -> None:
    async with elastic(reference) as engine:
        traffic = Traffic(engine, reference)
        await traffic.more(1)
        with pytest.raises(EngineDead, match=r"epoch 2 was not reached: engine core 1 died: .* was ended by SIGKILL"):
            await engine.scale(2, at("committing", lambda: kill_last_worker(engine)))
        with pytest.raises(EngineDead, match="epoch 2 was not reached"):
            engine.check_health()
        with pytest.raises(EngineDead, match="epoch 2 was not reached"):
            await engine.scale(1)
        async with asyncio.timeout(3 * PATIENCE):
            assert all(isinstance(error, EngineDead) for error in await traffic.failures())
            await wait_until(lambda: len(failures(engine)) == 2)  # nobody waits for ever
        assert_both_name(engine, "engine core 1")


async def test_a_rank_that_hangs_while_it_serves(reference: Reference) -> None:
    async with elastic(reference) as engine:
        await engine.scale(2)
        traffic = Traffic(engine, reference)
        await traffic.more(1)
        stop_last_worker(engine)
        assert await dead(engine, within=2 * PATIENCE + 3) > PATIENCE / 2
        async with asyncio.timeout(2 * PATIENCE):
            assert all(isinstance(error, EngineDead) for error in await traffic.failures())
            await wait_until(lambda: len(failures(engine)) == 2)
        assert_both_name(engine, "engine core 1")


async def test_a_rank_that_dies_while_it_serves(reference: Reference) -> None:
    async with elastic(reference, data_parallel_size=2) as engine:
        traffic = Traffic(engine, reference)
        await traffic.more(1)
        kill_last_worker(engine)
        assert await dead(engine, within=PATIENCE) < PATIENCE
        async with asyncio.timeout(3 * PATIENCE):
            assert all(isinstance(error, EngineDead) for error in await traffic.failures())
            await wait_until(lambda: len(failures(engine)) == 2)
        assert any(re.search(r"rank 0 \(process \d+\) was ended by SIGKILL", failure) for failure in failures(engine))
        assert_both_name(engine, "engine core 1")


# ---- cores of several ranks ----


def kill_rank(engine: AsyncEngine, core: int, rank: int) -> None:
    os.kill(children(engine.cores.processes[core].pid)[rank], signal.SIGKILL)


async def test_one_of_the_ranks_that_split_a_core_dies(reference: Reference) -> None:
    """A rank of a joiner in prepare; then one of a core that goes on, after the commit."""
    async with elastic(reference, tensor_parallel_size=2) as engine:
        with pytest.raises(EpochFailed, match=r"engine core 1 died: .*rank 1 \(process \d+\) was ended by SIGKILL"):
            await engine.scale(2, at("preparing", lambda: kill_rank(engine, 1, 1)))
        assert engine.cores.membership.epoch == 1 and len(engine.cores.processes) == 1
        assert_greedy(await complete(engine, reference), reference)
        await engine.scale(2)
        traffic = Traffic(engine, reference, streams=2)
        await traffic.more(1)
        kill_rank(engine, 0, 1)
        await dead(engine, within=PATIENCE)
        async with asyncio.timeout(3 * PATIENCE):
            assert all(isinstance(error, EngineDead) for error in await traffic.failures())
            await wait_until(lambda: len(failures(engine)) == 2)
        assert any(re.search(r"rank 1 \(process \d+\) was ended by SIGKILL", failure) for failure in failures(engine))
        assert_both_name(engine, "engine core 0")
