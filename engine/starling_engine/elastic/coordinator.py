"""Leads a group's cores from one epoch to the next: prepare, commit, release. The first epoch is a change from no core to some."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from starling_engine.core.client import CoreClient
from starling_engine.elastic.epoch_plans import EpochCore, ExpertSpace, leaving_plan, make_plans
from starling_engine.errors import EngineDead, EpochFailed, OperationRunning, StarlingError
from starling_engine.topology.epoch import EpochPlan, ExpertLoads, merge_loaded
from starling_engine.topology.placement import Placement

logger = logging.getLogger("starling.elastic")

Result = TypeVar("Result")

Stage = Literal["waiting", "preparing", "committing", "releasing"]


@dataclass(slots=True)
class SizeChange:
    """A change to `target` cores; `on_stage` is called when a stage begins."""

    target: int
    on_stage: Callable[[Stage], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage that has ended."""
    loaded: dict[str, ExpertLoads] = field(default_factory=dict)
    """Experts that ranks loaded for it, by their source."""
    stage: Stage | None = None
    _since: float = 0.0

    def enter(self, stage: Stage) -> None:
        self.end_stage()
        self.stage, self._since = stage, time.monotonic()
        if self.on_stage is not None:
            self.on_stage(stage)

    def end_stage(self) -> None:
        if self.stage is not None:
            self.seconds[self.stage] = time.monotonic() - self._since


class CorePool(Protocol):
    """Starts cores, and ends them."""

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        """Starts cores for these data parallel ranks; returns them when all have loaded, with their nodes' addresses.

        Raises the error that ended the loading of one, and then starts none.
        """
        ...

    async def release(self, clients: Sequence[CoreClient]) -> None:
        """Takes cores back, which are in no epoch any more."""
        ...


class Coordinator:
    """Makes one change at a time. `patience` is how long, in seconds, ranks wait for each other."""

    def __init__(self, space: ExpertSpace, pool: CorePool, patience: float) -> None:
        self.cores: list[EpochCore] = []
        """Cores of the serving epoch, by data parallel rank."""
        self.epoch = 0
        self.placement: Placement | None = None
        self._space = space
        self._pool = pool
        self._patience = patience
        self._last_epoch = 0
        """The highest number that an epoch was given, though it may not have been reached."""
        self._ids = 0
        self._current: SizeChange | None = None
        self._failure: str | None = None
        """Cause of the group's end, where a commit was begun and not finished."""

    @property
    def data(self) -> int:
        return len(self.cores)

    @property
    def dead(self) -> str | None:
        """Cause of the group's end; None while it can go on."""
        failures = (core.client.failure for core in self.cores)
        return self._failure or next((failure for failure in failures if failure is not None), None)

    def check(self) -> None:
        """Raises EngineDead when the group cannot go on."""
        if self.dead is not None:
            raise EngineDead(self.dead)

    async def resize(self, change: SizeChange) -> None:
        """Changes the group to `change.target` cores. Cancelling the task undoes it until the commit; later it has no effect.

        Raises EpochFailed when it failed and the old epoch goes on, and EngineDead when the group cannot go on. For the first size,
        raises the error that ended the loading. Raises OperationRunning, ConfigError and EngineDead before anything is changed.
        """
        if self._current is not None:
            stage = self._current.stage or "beginning"
            raise OperationRunning(f"a change from {self.data} to {self._current.target} engine cores is {stage}")
        self.check()
        self._space.check(change.target)
        self._current = change
        try:
            await self._resize(change)
        finally:
            self._current = None

    async def _resize(self, change: SizeChange) -> None:
        change.enter("waiting")
        joiners = await self._launch(change.target - self.data)
        try:
            cores = (self.cores + joiners)[: change.target]
            leavers = self.cores[change.target :]
            change.enter("preparing")
            epoch_plan = await self._prepare(change, cores, leavers)
        except BaseException:
            await self._release(joiners)
            raise
        await run_to_end(self._finish(change, epoch_plan, cores, leavers))

    async def _finish(self, change: SizeChange, epoch_plan: EpochPlan, cores: list[EpochCore], leavers: list[EpochCore]) -> None:
        change.enter("committing")
        await self._commit(epoch_plan, cores, leavers)
        change.enter("releasing")
        await self._release(leavers)
        change.end_stage()

    async def _launch(self, count: int) -> list[EpochCore]:
        if count <= 0:
            return []
        try:
            launched = await self._pool.launch(range(self.data, self.data + count))
        except StarlingError as error:
            if not self.cores:
                raise
            raise EpochFailed(f"new engine cores: {error}") from error
        self._ids += count
        return [EpochCore(self._ids - count + i, client, host) for i, (client, host) in enumerate(launched)]

    async def _release(self, cores: list[EpochCore]) -> None:
        await self._pool.release([core.client for core in cores])

    async def _prepare(self, change: SizeChange, cores: list[EpochCore], leavers: list[EpochCore]) -> EpochPlan:
        """Makes all ready to switch. Where it raises, nothing has changed."""
        self._last_epoch += 1
        placement = self._space.place(self._placement_now(), len(cores))
        epoch_plans = make_plans(self._last_epoch, cores, placement, self._patience, served=self.data)
        calls = [core.client.prepare(epoch_plan) for core, epoch_plan in zip(cores, epoch_plans, strict=True)]
        calls += [core.client.prepare(leaving_plan(epoch_plans[0])) for core in leavers]
        try:
            prepared = await gather_or_cancel(calls)
        except BaseException as error:
            await self._abandon(self._last_epoch, cores + leavers)
            if isinstance(error, EngineDead) and self.cores and all(core.client.failure is None for core in self.cores):
                raise EpochFailed(str(error)) from error
            raise
        change.loaded = merge_loaded(each.loaded for each in prepared)
        _log_loaded(self._last_epoch, change.loaded)
        return epoch_plans[0]

    def _placement_now(self) -> Placement | None:
        """Returns the epoch's first placement, with the layers that were rearranged since; None before the first epoch."""
        first = self.placement
        if first is None:
            return None
        rearranged = self.cores[0].client.rearranged.get(self.epoch, {})
        return Placement(first.num_experts, tuple(rearranged.get(row, layer) for row, layer in enumerate(first.layers)))

    async def _commit(self, epoch_plan: EpochPlan, cores: list[EpochCore], leavers: list[EpochCore]) -> None:
        """Switches all. There is no way back: ranks that have switched wait for those that have not."""
        try:
            await gather_or_cancel([core.client.commit(epoch_plan.number) for core in cores + leavers])
        except BaseException as error:
            self._failure = f"epoch {epoch_plan.number} was not reached: {error or type(error).__name__}"
            if isinstance(error, StarlingError):
                raise EngineDead(self._failure) from error
            raise
        self.cores, self.epoch, self.placement = cores, epoch_plan.number, epoch_plan.placement
        logger.info("epoch %d serves with %d data parallel ranks", epoch_plan.number, len(cores))

    async def _abandon(self, number: int, cores: list[EpochCore]) -> None:
        for core in cores:
            if core.client.failure is None:
                with suppress(StarlingError):
                    await core.client.abandon(number)


def _log_loaded(number: int, loaded: Mapping[str, ExpertLoads]) -> None:
    texts = [f"{loads.experts} from {source} at {loads.rate / 1e6:.0f} MB/s" for source, loads in loaded.items() if loads.experts]
    if texts:
        logger.info("epoch %d: experts that ranks loaded: %s", number, ", ".join(texts))


# ---- waiting for tasks ----


async def gather_or_cancel(work: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """Runs all at once; returns their results, in order. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def run_to_end(work: Coroutine[None, None, None]) -> None:
    """Runs to the end even if the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            logger.info("cancelled too late: the commit has begun")
            caller = asyncio.current_task()
            assert caller is not None
            caller.uncancel()
