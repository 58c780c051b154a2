"""Leads a group's cores from one epoch to the next: prepare, commit, release. The first epoch is a change from no core to some."""

import logging
from collections.abc import Mapping
from contextlib import suppress

from starling_engine.elastic.change import SizeChange
from starling_engine.elastic.expert_space import ExpertSpace
from starling_engine.elastic.members import CoreMember, CorePool
from starling_engine.elastic.plans import leaving_plan, make_plans
from starling_engine.elastic.waiting import at_once, to_its_end
from starling_engine.errors import EngineDead, EpochFailed, OperationRunning, StarlingError
from starling_engine.topology.epoch import Abandon, Commit, EpochPlan, ExpertLoads, Prepare, Prepared, merge_loaded
from starling_engine.topology.placement import Placement

logger = logging.getLogger("starling.elastic")


class Coordinator:
    """One change at a time. `patience` is how long, in seconds, ranks wait for each other."""

    def __init__(self, space: ExpertSpace, cores: CorePool, patience: float) -> None:
        self.members: list[CoreMember] = []
        """Of the serving epoch, by data parallel rank."""
        self.epoch = 0
        self.placement: Placement | None = None
        self._space = space
        self._cores = cores
        self._patience = patience
        self._numbers = 0
        self._ids = 0
        self._current: SizeChange | None = None
        self._failure: str | None = None
        """Why the group cannot go on: a commit was begun and not finished."""

    @property
    def data(self) -> int:
        return len(self.members)

    @property
    def dead(self) -> str | None:
        """Why the group cannot go on; None while it can."""
        failures = (member.client.failure for member in self.members)
        return self._failure or next((failure for failure in failures if failure is not None), None)

    def check(self) -> None:
        """Raises EngineDead when the group cannot go on."""
        if self.dead is not None:
            raise EngineDead(self.dead)

    async def resize(self, change: SizeChange) -> None:
        """To `change.target` cores. Cancelling the task before the commit undoes it; later it is too late, and is forgotten.

        Raises EpochFailed when it came to nothing and the old epoch goes on, and EngineDead when the group can not go on. Of the
        first size, what ended the loading. OperationRunning, ConfigError and EngineDead before anything is changed.
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
        await to_its_end(self._finish(change, plan, members, leavers))

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
        """All are ready to switch, or nothing has changed."""
        self._numbers += 1
        placement = self._space.place(self._placement_now(), len(members))
        plans = make_plans(self._numbers, members, placement, self._patience, served=self.data)
        orders = [member.client.order(Prepare(plan)) for member, plan in zip(members, plans, strict=True)]
        orders += [member.client.order(Prepare(leaving_plan(plans[0]))) for member in leavers]
        try:
            answers = await at_once(orders)
        except BaseException as error:
            await self._abandon(self._numbers, members + leavers)
            if isinstance(error, EngineDead) and self.members and all(member.client.failure is None for member in self.members):
                raise EpochFailed(str(error)) from error
            raise
        change.loaded = merge_loaded(answer.loaded for answer in answers if isinstance(answer, Prepared))
        _log_loaded(self._numbers, change.loaded)
        return plans[0]

    def _placement_now(self) -> Placement | None:
        """The epoch's first, with what ranks have told of layers that were rearranged since."""
        first = self.placement
        if first is None:
            return None
        told = self.members[0].client.rearranged.get(self.epoch, {})
        return Placement(first.num_experts, tuple(told.get(row, layer) for row, layer in enumerate(first.layers)))

    async def _commit(self, plan: EpochPlan, members: list[CoreMember], leavers: list[CoreMember]) -> None:
        """From here there is no way back: ranks that have switched wait for those that have not."""
        try:
            await at_once([member.client.order(Commit(plan.number)) for member in members + leavers])
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
                    await member.client.send(Abandon(number))


def _log_loaded(number: int, loaded: Mapping[str, ExpertLoads]) -> None:
    parts = [f"{part.experts} from {source} at {part.rate / 1e6:.0f} MB/s" for source, part in loaded.items() if part.experts]
    if parts:
        logger.info("epoch %d: experts that ranks loaded: %s", number, ", ".join(parts))
