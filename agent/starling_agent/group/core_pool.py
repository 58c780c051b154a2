"""The engine cores of all nodes, as whoever leads the group reaches them."""

from collections.abc import Sequence

import structlog
import zmq.asyncio
from starling_engine.core.client import CoreClient
from starling_engine.errors import EngineDead

from starling_agent.group.leader import Leader

WAIT_SECONDS = 1.0
log = structlog.get_logger("starling.group")


class GroupCorePool:
    """Nodes start their cores by themselves and tell the leader; a core that has left its epoch stands by until its node goes.

    `lockstep`: only cores that stand by can join.
    """

    def __init__(self, leader: Leader, progress_timeout: float, *, lockstep: bool) -> None:
        self._leader = leader
        self._progress_timeout = progress_timeout
        self._lockstep = lockstep
        self._context = zmq.asyncio.Context()
        self._clients: dict[str, CoreClient] = {}
        """By address."""

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        """Waits for as long as it takes until these cores are there and ready to join."""
        joined: dict[int, tuple[CoreClient, str]] = {}
        try:
            while len(joined) < len(ranks):
                for rank, address, host in self._told(ranks):
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

    def _told(self, ranks: Sequence[int]) -> list[tuple[int, str, str]]:
        """Rank, address and node's address of those cores that nodes have told of."""
        members = self._leader.view.members
        return [(core.rank, core.address, member.address) for member in members for core in member.cores if core.rank in ranks]

    async def _connect(self, rank: int, address: str, host: str) -> CoreClient | None:
        """None for one that is not there any more, or not to be had yet."""
        client = CoreClient(self._context, address, self._progress_timeout, name=f"engine core {rank} on {host}")
        try:
            await client.connect()
        except EngineDead as error:
            log.info("a core is not there", core=client.name, cause=str(error))
            await client.close()
            return None
        if self._lockstep and client.taking:  # of a membership that is about to break
            await client.close()
            return None
        self._clients[address] = client
        return client
