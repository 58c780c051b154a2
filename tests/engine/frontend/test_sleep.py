"""Sleep as a script uses it, with real engines: memory is free, answers are the same, and nobody hangs."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from starling_engine import LLM, AsyncEngine, PoolingParams, SamplingParams
from starling_engine.errors import ConfigError, EngineAsleep, InvalidRequest, RequestFailed, SleepFailed, SleepRefused
from starling_engine.frontend.resolve import resolve
from starling_engine.topology.layout import NodePlacement

from tests.engine.checkpoints import VARIANTS, write_checkpoint
from tests.engine.real_engine import MODEL, engine_args, running

MIB = 1 << 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)


def resident(llm: LLM) -> int:
    """Bytes of the core's memory that it does not share with others."""
    (core,) = llm.engine.cores.processes
    lines = Path(f"/proc/{core.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_", "Anonymous:")) and "Dirty" in line)


@pytest.mark.usefixtures("programs")  # a fork shares memory with others until it writes there
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_free_while_it_sleeps(dtype: str, tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    args: dict[str, Any] = {"dtype": dtype, "max_model_len": 1024, "kv_cache_memory_bytes": 32 * MIB}
    with LLM(str(folder), num_threads=1, show_progress=False, **args) as llm:
        # Different prompts of 900 tokens: as many pages as make a difference.
        ids = llm.get_tokenizer().encode("The list of a dictionary")
        prompts: list[Any] = [[*ids, *([number] * 900)] for number in range(6)]

        def answers() -> list[list[int]]:
            """One after another: oneDNN keeps scratch memory for the largest step there was."""
            return [list(llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]

        before = answers()
        ledger = llm.engine.cores.memory
        cache = min(6 * (900 + len(ids)) // ledger.block_size, ledger.num_blocks) * ledger.slab_bytes
        awake = resident(llm)
        llm.sleep(level=1)
        light = resident(llm)
        assert awake - light > 0.9 * cache
        with pytest.raises(EngineAsleep, match="POST /wake_up"):
            answers()
        llm.wake_up()
        assert resident(llm) < light + MIB, "pages come back as they are written"
        assert answers() == before
        llm.sleep(level=2)
        deep = resident(llm)
        assert awake - deep > 0.9 * (cache + ledger.weights)
        (folder / "model.safetensors").rename(folder / "aside")
        with pytest.raises(SleepFailed, match=r"could not wake up: WeightError: .*model\.safetensors"):
            llm.wake_up(tags=["weights"])
        assert llm.engine.is_sleeping
        llm.engine.check_health()
        (folder / "aside").rename(folder / "model.safetensors")
        began = time.monotonic()
        llm.wake_up(tags=["weights"])
        assert llm.engine.is_sleeping and not llm.engine.is_awake
        llm.wake_up(tags=["kv_cache"])
        took = time.monotonic() - began
        print(f"{dtype}: {awake >> 20} MiB awake, {light >> 20} at level 1, {deep >> 20} at level 2; woken in {took:.3f} s")
        assert answers() == before
        llm.sleep(level=2)
        assert resident(llm) < deep + 2 * MIB, "what came anew goes as well"


async def test_requests_are_finished_or_aborted_or_prevent_sleep() -> None:
    async with running() as engine:
        stream = engine.stream("import", ENDLESS)
        await anext(stream)
        with pytest.raises(SleepRefused, match="1 requests have not ended"):
            await engine.sleep()
        assert engine.is_awake
        for level, mode, words in ((0, None, "must be 1"), (3, None, "must be 1"), (1, "keep", "abort or wait")):
            with pytest.raises(InvalidRequest, match=words):
                await engine.sleep(level, mode)
        with pytest.raises(InvalidRequest, match="weights, kv_cache"):
            await engine.wake_up(["kv"])
        sleeping = asyncio.create_task(engine.sleep(1, "wait"))
        while engine.is_awake:  # noqa: ASYNC110 - the core says so
            await asyncio.sleep(0.001)
        assert not engine.is_sleeping, "the request goes on"
        with pytest.raises(EngineAsleep):
            await engine.complete("late", GREEDY)
        ends = [delta.outputs[0].finish_reason async for delta in stream if delta.finished]
        await sleeping
        assert ends == ["length"] and engine.is_sleeping
        await engine.wake_up()
        stream = engine.stream("import", ENDLESS)
        await anext(stream)
        vector = asyncio.create_task(engine.embed([5] * 500, PoolingParams()))
        await asyncio.sleep(0)
        await engine.sleep(2, "abort")
        assert [delta.outputs[0].finish_reason async for delta in stream if delta.finished] == ["abort"]
        with pytest.raises((RequestFailed, EngineAsleep), match="sleep"):
            await vector
        await engine.wake_up()
        assert len((await engine.complete("again", GREEDY)).outputs[0].token_ids) == 8


async def test_all_cores_of_a_group_sleep_or_none_does() -> None:
    """Either node may be asked, and the other one's frontend is informed."""
    args = engine_args(data_parallel_size=2)
    first, second = [await AsyncEngine.start(args, node=NodePlacement("127.0.0.1", (rank,), ranks=1)) for rank in range(2)]
    try:
        for engine, other in ((first, second), (second, first)):
            await engine.cores.add("the other core", other.cores.advertised_addresses[0])
        before = await first.complete("import", GREEDY)
        stream = second.stream("import", ENDLESS)  # on one of them
        await anext(stream)
        with pytest.raises(SleepRefused, match="core does not sleep: 1 requests"):
            await first.sleep()
        assert len([client for client in first.cores.serving if client.sleep_state.taking]) == 2, "the other one was woken again"
        await first.sleep(1, "abort")
        assert first.is_sleeping
        assert [delta.outputs[0].finish_reason async for delta in stream if delta.finished] == ["abort"]
        with pytest.raises(EngineAsleep):
            await second.complete("import", GREEDY)
        await second.wake_up()
        async with asyncio.timeout(60):
            while not first.is_awake:  # noqa: ASYNC110 - the cores say so
                await asyncio.sleep(0.001)
        after = await asyncio.gather(*(engine.complete("import", GREEDY) for engine in (first, second, first, second)))
        assert {tuple(output.outputs[0].token_ids) for output in after} == {tuple(before.outputs[0].token_ids)}
    finally:
        await first.shutdown()
        await second.shutdown()


def test_cores_with_dp_sync_do_not_sleep(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-moe"])
    args = {"model": str(tmp_path), "data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 128}
    with pytest.raises(ConfigError, match="enable_sleep_mode: cores that share experts step together"):
        resolve(engine_args(**args, enable_sleep_mode=True))
    resolve(engine_args(**args))
