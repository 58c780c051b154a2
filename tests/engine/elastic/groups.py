"""Groups of engine cores, each a process with ranks of its own, that hold a model's experts among them."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starling_engine import AsyncEngine, SamplingParams

from tests.engine.checkpoints import STEPS, Reference
from tests.engine.cores import assert_greedy
from tests.engine.real_engine import running
from tests.engine.written import write_tokenizer
from tests.fork_server import all_forks, forks_of

MARK = "STARLING_TEST_GROUP"
"""The variable by which the processes of a group are known."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


@asynccontextmanager
async def group(reference: Reference, **args: Any) -> AsyncIterator[AsyncEngine]:
    """Starts a group. When it ends, no process of it is left, be it an orphan."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    settings: dict[str, Any] = {"enable_expert_parallel": True, "max_num_batched_tokens": 24, "progress_timeout": 10.0}
    write_tokenizer(reference.folder)
    async with running(**{"model": str(reference.folder), **settings, **args}) as engine:
        yield engine
    async with asyncio.timeout(60):
        while marked(mark):  # noqa: ASYNC110 - processes send no events
            await asyncio.sleep(0.02)


async def complete(engine: AsyncEngine, reference: Reference, **options: Any) -> list[int]:
    output = await engine.complete(reference.prompt, GREEDY, **options)
    return output.outputs[0].token_ids


async def complete_many(engine: AsyncEngine, reference: Reference, count: int) -> list[list[int]]:
    """Completes `count` requests at once, each with a cache of its own."""
    return await asyncio.gather(*(complete(engine, reference, cache_salt=str(i)) for i in range(count)))


class Traffic:
    """Requests one after another in several streams, until it is stopped; each is as transformers has it."""

    def __init__(self, engine: AsyncEngine, reference: Reference, streams: int = 3) -> None:
        self.done = 0
        self._stopped = False
        self._tasks = [asyncio.create_task(self._stream(engine, reference, f"{i}")) for i in range(streams)]

    async def _stream(self, engine: AsyncEngine, reference: Reference, name: str) -> None:
        while not self._stopped:
            assert_greedy(await complete(engine, reference, cache_salt=f"{name}-{self.done}"), reference)
            self.done += 1

    async def more(self, count: int = 4) -> None:
        """Waits for further answers."""
        wanted = self.done + count
        while self.done < wanted:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def failures(self) -> list[BaseException]:
        """Returns the errors that ended streams."""
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        return [error for error in ended if error is not None]


def children(parent: int) -> list[int]:
    """The engine's processes that `parent` has started, in their order."""
    return [*forks_of(parent)]


def marked(mark: str) -> list[int]:
    return [pid for pid, fork in all_forks().items() if fork["environment"].get(MARK) == mark]


def worker_of(engine: AsyncEngine, core: int) -> int:
    """The process of the only rank of one of the engine's cores."""
    return children(engine.cores.processes[core].pid)[0]


def cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def all_asleep(engine: AsyncEngine) -> None:
    """Waits until no rank has run for a while, or wants to: one that only waits for a processor does not sleep."""
    ranks = [pid for core in engine.cores.processes for pid in children(core.pid)]
    before: list[tuple[str, float]] = []
    while (now := [(_stat(pid)[0], cpu_seconds(pid)) for pid in ranks]) != before or any(state != "S" for state, _ in now):
        before = now
        await asyncio.sleep(0.3)


def _stat(pid: int) -> list[str]:
    """See proc(5): from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
