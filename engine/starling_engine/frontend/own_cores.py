"""The engine cores that a frontend starts itself, each a process of this machine."""

import asyncio
from collections.abc import Callable, Sequence

import zmq.asyncio

from starling_engine.config import EngineConfig
from starling_engine.core.client import CoreClient
from starling_engine.core.launcher import CoreHandle
from starling_engine.core.messages import Loading, ShutdownCore
from starling_engine.delta import Stats, add_totals
from starling_engine.elastic.waiting import at_once

HOST = "127.0.0.1"


class LocalCores:
    """Started and ended in any number. `host` as in `CoreHandle`."""

    def __init__(self, context: "zmq.asyncio.Context", config: EngineConfig, host: str | None = None) -> None:
        self.past = Stats()
        """What cores that have ended had counted."""
        self._context = context
        self._config = config
        self._host = host
        self._processes: dict[CoreClient, CoreHandle] = {}

    @property
    def clients(self) -> list[CoreClient]:
        """In the order in which they were started."""
        return list(self._processes)

    @property
    def processes(self) -> list[CoreHandle]:
        return list(self._processes.values())

    async def start(
        self, ranks: Sequence[int], on_phase: Callable[[Loading], None] | None = None, *, alone: bool = False
    ) -> list[CoreClient]:
        """Waits until they have loaded; all of them or none. Raises what ended the loading. `alone`: there is no rank but 0."""
        started: list[CoreClient] = []
        for rank in ranks:
            name = "the engine core" if alone else f"engine core {rank}"
            process = CoreHandle(self._config.of_core(rank), self._host)
            client = CoreClient(self._context, process.address, self._config.progress_timeout, process, name, lambda: self.clients)
            self._processes[client] = process
            started.append(client)
        try:
            await at_once([client.connect(on_phase if client is started[0] else None) for client in started])
        except BaseException:
            for client in started:
                self._processes[client].kill()
            await self.end(started)
            raise
        return started

    async def end(self, clients: Sequence[CoreClient]) -> None:
        """Open requests end with them."""
        for client in clients:
            if client.failure is None and client.hello is not None:
                await client.send(ShutdownCore())
        for client in clients:
            await client.close()
        for client in clients:
            process = self._processes.pop(client)
            if client.failure is not None:  # it would not listen
                process.kill()
            await _until_ended(process)
            process.close(timeout=0)
            add_totals(self.past, client.stats)

    # ---- as a coordinator sees them ----

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        return [(client, HOST) for client in await self.start(ranks)]

    async def release(self, clients: Sequence[CoreClient]) -> None:
        await self.end(clients)


async def _until_ended(process: CoreHandle) -> None:
    """Looks every 20 ms for 8 s: a core writes to its tiers outside, and takes leave of a store. At the program's end, when `LLM`
    shuts down, no thread can be had to wait in.
    """
    for _ in range(400):
        if process.exit_reason() is not None:
            return
        await asyncio.sleep(0.02)
