"""Leads a group's cores from one epoch to the next: prepare, commit, release. The first epoch is a change from no core to some."""

import logging
from collections.abc import Mapping
from contextlib import suppress

from starling_engine.elastic.change import SizeChange
from starling_engine.elastic.expert_space import ExpertSpace
from starling_engine.elastic.members import CoreMember, CorePool
from starling_engine.elastic.plans import leaving_plan, make_plans
from starling_engine.elastic.tasks import gather_or_cancel, run_to_end
from starling_engine.errors import EngineDead, EpochFailed, OperationRunning, StarlingError
from starling_engine.topology.epoch import EpochPlan, ExpertLoads, merge_loaded
from starling_engine.topology.placement import Placement

logger = logging.getLogger("starling.elastic")


class Coordinator:
    """Makes one change at a time. `patience` is how long, in seconds, ranks wait for each other."""

    def __init__(self, space: ExpertSpace, cores: CorePool, patience: float) -> None:
        self.members: list[CoreMember] = []
        """Cores of the serving epoch, by data parallel rank."""
        self.epoch = 0
        self.placement: Placement | None = None
        self._space = space
        self._cores = cores
        self._patience = patience
        self._last_epoch = 0
        """The highest number that an epoch was given, though it may not have been reached."""
        self._ids = 0
        self._current: SizeChange | None = None
        self._failure: str | None = None
        """Cause of the group's end, where a commit was begun and not finished."""

    @property
    def data(self) -> int:
        return len(self.members)

    @property
    def dead(self) -> str | None:
        """Cause of the group's end; None while it can go on."""
        failures = (member.client.failure for member in self.members)
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
            members = (self.members + joiners)[: change.target]
            leavers = self.members[change.target :]
            change.enter("preparing")
            plan = await self._prepare(change, members, leavers)
        except BaseException:
            await self._release(joiners)
            raise
        await run_to_end(self._finish(change, plan, members, leavers))

    async def _finish(self, change: SizeChange, plan: EpochPlan, members: list[CoreMember], leavers: list[CoreMember]) -> None:
        change.enter("committing")
        await self._commit(plan, members, leavers)
        change.enter("releasing")
        await self._release(leavers)
        change.end_stage()

    async def _launch(self, count: int) -> list[CoreMember]:
        if count <= 0:
            return []
        try:
            launched = await self._cores.launch(range(self.data, self.data + count))
        except StarlingError as error:
            if not self.members:
                raise
            raise EpochFailed(f"new engine cores: {error}") from error
        self._ids += count
        return [CoreMember(self._ids - count + i, client, host) for i, (client, host) in enumerate(launched)]

    async def _release(self, members: list[CoreMember]) -> None:
        await self._cores.release([member.client for member in members])

    async def _prepare(self, change: SizeChange, members: list[CoreMember], leavers: list[CoreMember]) -> EpochPlan:
        """Makes all ready to switch. Where it raises, nothing has changed."""
        self._last_epoch += 1
        placement = self._space.place(self._placement_now(), len(members))
        plans = make_plans(self._last_epoch, members, placement, self._patience, served=self.data)
        calls = [member.client.prepare(plan) for member, plan in zip(members, plans, strict=True)]
        calls += [member.client.prepare(leaving_plan(plans[0])) for member in leavers]
        try:
            prepared = await gather_or_cancel(calls)
        except BaseException as error:
            await self._abandon(self._last_epoch, members + leavers)
            if isinstance(error, EngineDead) and self.members and all(member.client.failure is None for member in self.members):
                raise EpochFailed(str(error)) from error
            raise
        change.loaded = merge_loaded(each.loaded for each in prepared)
        _log_loaded(self._last_epoch, change.loaded)
        return plans[0]

    def _placement_now(self) -> Placement | None:
        """Returns the epoch's first placement, with the layers that were rearranged since; None before the first epoch."""
        first = self.placement
        if first is None:
            return None
        rearranged = self.members[0].client.rearranged.get(self.epoch, {})
        return Placement(first.num_experts, tuple(rearranged.get(row, layer) for row, layer in enumerate(first.layers)))

    async def _commit(self, plan: EpochPlan, members: list[CoreMember], leavers: list[CoreMember]) -> None:
        """Switches all. There is no way back: ranks that have switched wait for those that have not."""
        try:
            await gather_or_cancel([member.client.commit(plan.number) for member in members + leavers])
        except BaseException as error:
            self._failure = f"epoch {plan.number} was not reached: {error or type(error).__name__}"
            if isinstance(error, StarlingError):
                raise EngineDead(self._failure) from error
            raise
        self.members, self.epoch, self.placement = members, plan.number, plan.placement
        logger.info("epoch %d serves with %d data parallel ranks", plan.number, len(members))

    async def _abandon(self, number: int, members: list[CoreMember]) -> None:
        for member in members:
            if member.client.failure is None:
                with suppress(StarlingError):
                    await member.client.abandon(number)


def _log_loaded(number: int, loaded: Mapping[str, ExpertLoads]) -> None:
    texts = [f"{loads.experts} from {source} at {loads.rate / 1e6:.0f} MB/s" for source, loads in loaded.items() if loads.experts]
    if texts:
        logger.info("epoch %d: experts that ranks loaded: %s", number, ", ".join(texts))
