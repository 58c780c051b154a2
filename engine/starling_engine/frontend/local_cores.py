"""The engine cores that a frontend starts itself, each in a process on this machine."""

import asyncio
from collections.abc import Callable, Sequence

import zmq.asyncio

from starling_engine.config import EngineConfig
from starling_engine.core.client import CoreClient
from starling_engine.core.launcher import CoreHandle
from starling_engine.core.messages import Loading, ShutdownCore
from starling_engine.delta import Stats, add_totals
from starling_engine.elastic.coordinator import gather_or_cancel

HOST = "127.0.0.1"


class LocalCores:
    """Starts and ends cores. `host` as in `CoreHandle`."""

    def __init__(self, context: "zmq.asyncio.Context", config: EngineConfig, host: str | None = None) -> None:
        self.past = Stats()
        """Counters of cores that have ended."""
        self._context = context
        self._config = config
        self._host = host
        self._processes: dict[CoreClient, CoreHandle] = {}

    @property
    def clients(self) -> list[CoreClient]:
        """Clients in the order of their start."""
        return list(self._processes)

    @property
    def processes(self) -> list[CoreHandle]:
        return list(self._processes.values())

    async def start(
        self, ranks: Sequence[int], on_phase: Callable[[Loading], None] | None = None, *, alone: bool = False
    ) -> list[CoreClient]:
        """Starts all cores or none; waits until they have loaded. Raises the error of loading. `alone`: there is only rank 0."""
        started: list[CoreClient] = []
        for rank in ranks:
            name = "the engine core" if alone else f"engine core {rank}"
            process = CoreHandle(self._config.of_core(rank), self._host)
            client = CoreClient(self._context, process.address, self._config.progress_timeout, process, name, lambda: self.clients)
            self._processes[client] = process
            started.append(client)
        try:
            await gather_or_cancel([client.connect(on_phase if client is started[0] else None) for client in started])
        except BaseException:
            for client in started:
                self._processes[client].kill()
            await self.end(started)
            raise
        return started

    async def end(self, clients: Sequence[CoreClient]) -> None:
        """Ends cores; open requests end with them."""
        for client in clients:
            if client.failure is None and client.hello is not None:
                await client.send(ShutdownCore())
        for client in clients:
            await client.close()
        for client in clients:
            process = self._processes.pop(client)
            if client.failure is not None:  # it would not read a message
                process.kill()
            await _until_ended(process)
            process.close(timeout=0)
            add_totals(self.past, client.stats)

    # ---- for a coordinator ----

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        return [(client, HOST) for client in await self.start(ranks)]

    async def release(self, clients: Sequence[CoreClient]) -> None:
        await self.end(clients)


async def _until_ended(process: CoreHandle) -> None:
    """Polls every 20 ms for 8 s: a core still writes to its secondary tiers, and disconnects from a store.

    No thread waits instead: when `LLM` shuts down at the program's end, none can be started.
    """
    for _ in range(400):
        if process.exit_reason() is not None:
            return
        await asyncio.sleep(0.02)
