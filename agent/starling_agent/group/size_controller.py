"""Brings a group to its size, on the leader and while its engine lives: when it starts, and when an operation asks for another."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Never, Protocol

import structlog
import zmq.asyncio
from starling_engine import AsyncEngine
from starling_engine.core.client import CoreClient
from starling_engine.elastic.coordinator import Coordinator, CorePool, SizeChange
from starling_engine.elastic.epoch_plans import ExpertSpace
from starling_engine.errors import EngineDead, EpochFailed

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.group import GroupView
from starling_agent.contract.scale import GroupSize
from starling_agent.group.leader import Leader

RETRY_SECONDS = 1.0
CHECK_SECONDS = 1.0
log = structlog.get_logger("starling.group")


class Resizer(Protocol):
    """Carries out one change at a time. A Coordinator does so for cores that share experts (EP): every change is a new epoch."""

    epoch: int
    """Number of the epoch that serves; always 0 for independent cores."""

    @property
    def data(self) -> int:
        """Data parallel size that serves now; 0 before the first resize."""
        ...

    @property
    def dead(self) -> str | None:
        """Cause of the loss of a rank; None while all are alive."""
        ...

    async def resize(self, change: SizeChange) -> None:
        """Goes through the stages of `change`. Cancelling this call before the commit undoes the change.

        Raises StarlingError if the change fails; the group then has its old size.
        """
        ...


class IndependentResizer:
    """A Resizer for independent cores: a change only decides which of them take requests."""

    def __init__(self, pool: CorePool) -> None:
        self.epoch = 0
        self._pool = pool
        self._clients: list[CoreClient] = []

    @property
    def data(self) -> int:
        return len(self._clients)

    @property
    def dead(self) -> str | None:
        return next((client.failure for client in self._clients if client.failure is not None), None)

    async def resize(self, change: SizeChange) -> None:
        change.enter("waiting")
        self._clients += [client for client, _ in await self._pool.launch(range(self.data, change.target))]
        change.enter("releasing")
        leavers, self._clients = self._clients[change.target :], self._clients[: change.target]
        await self._pool.release(leavers)
        change.end_stage()


class SizeController:
    """Restores the size that served last whenever the engine starts again, and then carries out resizes.

    `update_report` takes changes of the agent's report.
    """

    def __init__(self, leader: Leader, layout: LayoutConfig, update_report: Callable[..., Any]) -> None:
        self._leader = leader
        self._layout = layout
        self._update_report = update_report
        self._served = 0 if layout.elastic is not None else layout.data
        self._resizer: Resizer | None = None
        self._has_resizer = asyncio.Event()

    @property
    def data(self) -> int:
        """Data parallel size that serves now; 0 while no engine runs at the group's size."""
        return self._resizer.data if self._resizer is not None else 0

    @property
    def dead(self) -> str | None:
        """Cause of the loss of a rank; None while all are alive, or no engine runs."""
        return self._resizer.dead if self._resizer is not None else None

    async def resize(self, change: SizeChange) -> int:
        """Waits for an engine, then resizes as `Resizer.resize`. Returns the number of the epoch that serves then."""
        await self._has_resizer.wait()
        resizer = self._resizer
        assert resizer is not None
        await self._announce_and_resize(resizer, change)
        return resizer.epoch

    def set_resizer(self, resizer: Resizer | None) -> None:
        """Sets what carries changes out; with None they wait."""
        self._resizer = resizer
        if resizer is None:
            self._has_resizer.clear()
        else:
            self._has_resizer.set()

    async def run(self, engine: AsyncEngine) -> Never:
        """Runs until cancelled. Raises EngineDead when the group cannot go on."""
        exchanges_experts, patience = engine.config.worker.dp_sync, engine.config.progress_timeout
        pool = GroupCorePool(self._leader, patience, standby_only=exchanges_experts)
        resizer: Resizer = IndependentResizer(pool)
        if exchanges_experts:
            resizer = Coordinator(ExpertSpace.of(engine.model_config, engine.config), pool, patience)
        try:
            await self._restore_size(resizer)
            self.set_resizer(resizer)
            while True:
                self._served = resizer.data or self._served
                self._update_report(size=group_size(self._leader.view, self._layout, resizer.data))
                if exchanges_experts and resizer.dead is not None:
                    raise EngineDead(resizer.dead)
                await self._leader.changed(CHECK_SECONDS)
        finally:
            self.set_resizer(None)
            self._leader.announce_size(0, 0)
            await pool.close()

    async def _restore_size(self, resizer: Resizer) -> None:
        """Tries again until it succeeds: nodes restart at different times, and the leader may still list cores that ended."""
        while resizer.data != self._served:
            try:
                await self._announce_and_resize(resizer, SizeChange(self._served))
            except (EpochFailed, EngineDead) as error:
                log.warning("the group is not together yet", size=self._served, cause=str(error))
                self._update_report(last_error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _announce_and_resize(self, resizer: Resizer, change: SizeChange) -> None:
        """Announces the target to all nodes before the change, and the size that serves after it, even if it failed."""
        self._leader.announce_size(resizer.data, change.target)
        try:
            await resizer.resize(change)
        finally:
            self._leader.announce_size(resizer.data, resizer.data)


class GroupCorePool:
    """The engine cores of all nodes: each node starts its own, and reports them to the leader. One that left its epoch stands by.

    `standby_only`: only cores that stand by can join.
    """

    def __init__(self, leader: Leader, progress_timeout: float, *, standby_only: bool) -> None:
        self._leader = leader
        self._progress_timeout = progress_timeout
        self._standby_only = standby_only
        self._context = zmq.asyncio.Context()
        self._clients: dict[str, CoreClient] = {}
        """Clients by address."""

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        """Waits until these cores are there and ready to join, without a limit of time."""
        joined: dict[int, tuple[CoreClient, str]] = {}
        try:
            while len(joined) < len(ranks):
                for rank, address, host in self._reported(ranks):
                    if rank not in joined and (client := await self._connect(rank, address, host)) is not None:
                        joined[rank] = (client, host)
                if len(joined) < len(ranks):
                    await self._leader.changed(CHECK_SECONDS)
        except BaseException:
            await self.release([client for client, _ in joined.values()])
            raise
        return [joined[rank] for rank in ranks]

    async def release(self, clients: Sequence[CoreClient]) -> None:
        for client in clients:
            self._clients = {address: known for address, known in self._clients.items() if known is not client}
            await client.close()

    async def close(self) -> None:
        await self.release(list(self._clients.values()))
        self._context.term()

    def _reported(self, ranks: Sequence[int]) -> list[tuple[int, str, str]]:
        """Returns rank, address and node's address of the cores that nodes have reported."""
        members = self._leader.view.members
        return [(core.rank, core.address, member.address) for member in members for core in member.cores if core.rank in ranks]

    async def _connect(self, rank: int, address: str, host: str) -> CoreClient | None:
        """Returns None for a core that is gone, or cannot join yet."""
        client = CoreClient(self._context, address, self._progress_timeout, name=f"engine core {rank} on {host}")
        try:
            await client.connect()
        except EngineDead as error:
            log.info("a core is not there", core=client.name, cause=str(error))
            await client.close()
            return None
        if self._standby_only and client.taking:  # it is in an epoch that is about to break
            await client.close()
            return None
        self._clients[address] = client
        return client


def group_size(view: GroupView, layout: LayoutConfig, effective: int) -> GroupSize:
    """Counts data parallel ranks."""
    workers = layout.tensor * layout.pipeline
    cores = {core.rank for member in view.members for core in member.cores}
    return GroupSize(allocated=len(view.members) * layout.per_node // workers, joined=len(cores), effective=effective)
