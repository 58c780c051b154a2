"""Leads a group's cores from one epoch to the next: prepare, commit, release. The first epoch is a change from no core to some."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, Protocol

import msgspec

from starling_engine.config import EngineConfig
from starling_engine.core.client import CoreClient
from starling_engine.epoch import Abandon, Commit, EpochPlan, Prepare
from starling_engine.errors import ConfigError, EngineDead, EpochFailed, OperationRunning, StarlingError
from starling_engine.models.config import ModelConfig
from starling_engine.parallel.placement import Placement, even_slots, regroup, spread
from starling_engine.parallel.rendezvous import Rendezvous

logger = logging.getLogger("starling.elastic")

Stage = Literal["waiting", "preparing", "committing", "releasing"]
"""Where a change stands."""


@dataclass(frozen=True, slots=True)
class Member:
    """A core of the group, with an id that never changes, and the address of its node."""

    id: int
    client: CoreClient
    host: str


class Cores(Protocol):
    """Where cores come from and go to."""

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        """The cores that are to have these data parallel ranks, once all have loaded, and their nodes' addresses.

        Raises what ended the loading of one, and then starts none.
        """
        ...

    async def release(self, clients: Sequence[CoreClient]) -> None:
        """They are in no epoch any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpace:
    """What there is to place: `experts` in each of `layers`, on ranks with room for `slots` a layer, `tensor` of them a core."""

    experts: int
    layers: int
    slots: int
    tensor: int
    redundant: int | None = None
    """Copies of experts that are wanted besides the first of each; None: none, and ranks may hold one expert more than others."""

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> "ExpertSpace":
        worker = config.worker
        assert model.moe is not None and worker.lockstep, "only experts are held among several cores"
        return cls(
            experts=model.moe.num_experts,
            layers=len(model.moe.layers),
            slots=worker.expert_slots,
            tensor=worker.layout.tensor,
            redundant=worker.eplb.redundant if worker.eplb is not None else None,
        )

    def copies(self, ranks: int) -> int:
        """Of a layer's experts, besides the first of each, on so many ranks."""
        if self.redundant is None:
            return 0
        return min(self.slots, even_slots(self.experts, ranks, self.redundant)) * ranks - self.experts


@dataclass(slots=True)
class Change:
    """One change of size: what it has come to, and how many seconds each of its stages took."""

    target: int
    tell: Callable[[Stage], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    stage: Stage | None = None
    _since: float = 0.0

    def enter(self, stage: Stage) -> None:
        self.end_stage()
        self.stage, self._since = stage, time.monotonic()
        if self.tell is not None:
            self.tell(stage)

    def end_stage(self) -> None:
        if self.stage is not None:
            self.seconds[self.stage] = time.monotonic() - self._since


class Coordinator:
    """One change at a time. `patience` is how long, in seconds, ranks wait for each other."""

    def __init__(self, space: ExpertSpace, cores: Cores, patience: float) -> None:
        self.members: list[Member] = []
        """Of the serving epoch, by data parallel rank."""
        self.epoch = 0
        self.placement: Placement | None = None
        self._space = space
        self._cores = cores
        self._patience = patience
        self._numbers = 0
        self._ids = 0
        self._current: Change | None = None
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

    async def resize(self, change: Change) -> None:
        """To `change.target` cores. Cancelling the task before the commit undoes it; later it is too late, and is forgotten.

        Raises EpochFailed when it came to nothing and the old epoch goes on, and EngineDead when the group can not go on. Of the
        first size, what ended the loading. OperationRunning, ConfigError and EngineDead before anything is changed.
        """
        if self._current is not None:
            stage = self._current.stage or "beginning"
            raise OperationRunning(f"a change from {self.data} to {self._current.target} engine cores is {stage}")
        self.check()
        self._check_target(change.target)
        self._current = change
        try:
            await self._resize(change)
        finally:
            self._current = None

    async def _resize(self, change: Change) -> None:
        change.enter("waiting")
        joiners = await self._launch(change.target - self.data)
        try:
            members = (self.members + joiners)[: change.target]
            leavers = self.members[change.target :]
            change.enter("preparing")
            plan = await self._prepare(members, leavers)
        except BaseException:
            await self._release(joiners)
            raise
        await _to_its_end(self._finish(change, plan, members, leavers))

    async def _finish(self, change: Change, plan: EpochPlan, members: list[Member], leavers: list[Member]) -> None:
        change.enter("committing")
        await self._commit(plan, members, leavers)
        change.enter("releasing")
        await self._release(leavers)
        change.end_stage()

    def _check_target(self, target: int) -> None:
        space = self._space
        least, most = -(-space.experts // (space.slots * space.tensor)), space.experts // space.tensor
        if not least <= target <= most:
            raise ConfigError(
                f"{space.experts} experts and room for {space.slots} on each rank: {least} to {most} are possible, got {target}",
                "data_parallel_size",
            )

    async def _launch(self, count: int) -> list[Member]:
        if count <= 0:
            return []
        try:
            launched = await self._cores.launch(range(self.data, self.data + count))
        except StarlingError as error:
            if not self.members:
                raise
            raise EpochFailed(f"new engine cores: {error}") from error
        self._ids += count
        return [Member(self._ids - count + i, client, host) for i, (client, host) in enumerate(launched)]

    async def _release(self, members: list[Member]) -> None:
        await self._cores.release([member.client for member in members])

    async def _prepare(self, members: list[Member], leavers: list[Member]) -> EpochPlan:
        """All are ready to switch, or nothing has changed."""
        self._numbers += 1
        plans = self._plans(self._numbers, members)
        orders = [member.client.order(Prepare(plan)) for member, plan in zip(members, plans, strict=True)]
        gone = replace_dp(plans[0], None)
        orders += [member.client.order(Prepare(gone)) for member in leavers]
        try:
            await at_once(orders)
        except BaseException as error:
            await self._abandon(self._numbers, members + leavers)
            if isinstance(error, EngineDead) and self.members and all(member.client.failure is None for member in self.members):
                raise EpochFailed(str(error)) from error
            raise
        return plans[0]

    def _plans(self, number: int, members: list[Member]) -> list[EpochPlan]:
        space, ranks = self._space, len(members) * self._space.tensor
        if self.placement is None:
            placement = spread(space.experts, ranks, space.layers, space.slots, space.copies(ranks))
        else:
            placement = regroup(self._placement_now(self.placement), ranks, space.slots, space.copies(ranks))
        first = members[0]
        assert first.client.hello is not None, "only cores that have loaded are members"
        store = first.client.hello.store
        ids = tuple(member.id for member in members)
        return [
            EpochPlan(
                number=number,
                members=ids,
                dp=dp,
                placement=placement,
                rendezvous=Rendezvous(first.host, store, member.host, self._patience),
                nodes=count_nodes([member.host for member in members]),
            )
            for dp, member in enumerate(members)
        ]

    def _placement_now(self, placement: Placement) -> Placement:
        """`placement`, the epoch's first, with what ranks have told of layers that were rearranged since."""
        told = self.members[0].client.rearranged.get(self.epoch, {})
        return Placement(placement.num_experts, tuple(told.get(row, layer) for row, layer in enumerate(placement.layers)))

    async def _commit(self, plan: EpochPlan, members: list[Member], leavers: list[Member]) -> None:
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

    async def _abandon(self, number: int, members: list[Member]) -> None:
        for member in members:
            if member.client.failure is None:
                with suppress(StarlingError):
                    await member.client.send(Abandon(number))


def replace_dp(plan: EpochPlan, dp: int | None) -> EpochPlan:
    return msgspec.structs.replace(plan, dp=dp)


def count_nodes(hosts: Sequence[str]) -> int:
    """The nodes of members in their order, where each node has as many, next to each other; else 1."""
    sizes = [len(list(same)) for _, same in groupby(hosts)]
    return len(sizes) if len(set(sizes)) == 1 and len(sizes) == len(set(hosts)) else 1


async def at_once(work: Sequence[Coroutine[None, None, object]]) -> None:
    """The first failure ends the waiting for the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """Whatever cancels the caller meanwhile comes too late."""
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
