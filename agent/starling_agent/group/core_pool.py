"""The engine cores of all nodes, as the leader reaches them."""

from collections.abc import Sequence

import structlog
import zmq.asyncio
from starling_engine.core.client import CoreClient
from starling_engine.errors import EngineDead

from starling_agent.group.leader import Leader

WAIT_SECONDS = 1.0
log = structlog.get_logger("starling.group")


class GroupCorePool:
    """Nodes start their cores by themselves and report them to the leader. A core that has left its epoch stands by.

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
                    await self._leader.changed(WAIT_SECONDS)
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
