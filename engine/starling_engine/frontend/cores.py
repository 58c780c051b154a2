"""The engine cores that a frontend sends requests to: their connections, the choice of one, and their reports."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import zmq.asyncio

from starling_engine.config import EngineConfig
from starling_engine.core.client import CoreClient
from starling_engine.core.launcher import CoreHandle
from starling_engine.core.messages import Hello, ResetPrefixCache
from starling_engine.delta import Stats, add_stats
from starling_engine.elastic.coordinator import Coordinator
from starling_engine.errors import EngineAsleep, EngineDead
from starling_engine.frontend.load_balancer import LoadBalancer
from starling_engine.frontend.local_cores import LocalCores
from starling_engine.ledger import Ledger
from starling_engine.sleep import ASLEEP, TAGS, Mode, Tag
from starling_engine.topology.layout import EpochMembership

IDLE_POLL_SECONDS = 0.2


class CoreClients:
    """Clients of the cores that this frontend started (`local`) or attached to, and of other nodes' cores, which come and go.

    Belongs to the event loop that made it.
    """

    def __init__(self, config: EngineConfig, host: str | None = None) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self.local = LocalCores(self._context, config, host)
        self.coordinator: Coordinator | None = None
        """Coordinator of local cores that share the experts."""
        self._attached: list[CoreClient] = []
        self._remote: dict[str, CoreClient] = {}
        """Cores of other nodes, by name."""
        self._leaving: dict[asyncio.Task[None], CoreClient] = {}
        self._balancer = LoadBalancer()

    # ---- connections ----

    async def attach(self, addresses: Sequence[str]) -> None:
        """Connects to cores that run already. Raises EngineDead when one does not answer."""
        names = [f"engine core {i}" for i in range(len(addresses))] if len(addresses) > 1 else ["the engine core"]
        self._attached = [self._client(name, address) for name, address in zip(names, addresses, strict=True)]
        for client in self._attached:
            await client.connect()

    async def add(self, name: str, address: str) -> None:
        """Connects to a ready core of another node, which gets requests from now on. `name` must be new; errors have it.

        Cores of this node are preferred if the load is equal. Raises EngineDead when the core does not answer.
        """
        assert name not in self._remote, f"{name} is there already"
        client = self._client(name, address)
        try:
            await client.connect()
        except BaseException:
            await client.close()
            raise
        self._remote[name] = client

    def remove(self, name: str) -> None:
        """Sends no more requests to that core; those that it has go on to their end."""
        client = self._remote.pop(name)
        task = asyncio.create_task(_close_when_idle(client))
        self._leaving[task] = client
        task.add_done_callback(self._leaving.pop)

    def _client(self, name: str, address: str) -> CoreClient:
        return CoreClient(self._context, address, self._config.progress_timeout, name=name)

    async def close(self) -> None:
        """Ends the local cores; open requests end with them."""
        leaving = dict(self._leaving)
        for task in leaving:
            task.cancel()
        for client in [*self._attached, *self._remote.values(), *leaving.values()]:
            await client.close()
        await self.local.end(self.local.clients)
        self._context.term()

    @property
    def remote(self) -> dict[str, str | None]:
        """Failures of other nodes' cores by name, None for sound ones. A failed core gets no request until it is added again."""
        return {name: client.failure for name, client in self._remote.items()}

    @property
    def node_clients(self) -> list[CoreClient]:
        """Clients of this node's cores."""
        if self.coordinator is not None:
            return [core.client for core in self.coordinator.cores]
        return self.local.clients + self._attached

    @property
    def serving(self) -> list[CoreClient]:
        """Clients of all cores that serve, awake or not."""
        return [client for client in (*self.node_clients, *self._remote.values()) if client.taking]

    @property
    def connected(self) -> list[CoreClient]:
        """Returns `serving`. Raises EngineDead when there is none."""
        cores = self.serving
        if not cores:
            raise EngineDead("no engine core is connected")
        return cores

    def choose(self, ids: list[int], cache_salt: str | None = None) -> CoreClient:
        """Returns the core for a prompt. Raises EngineDead or EngineAsleep when none takes requests."""
        cores = [client for client in self.connected if client.sleep_state.taking]
        if not cores:
            raise EngineAsleep(ASLEEP)
        return cores[self._balancer.choose(cores, ids, cache_salt)]

    def check(self) -> None:
        """Raises EngineDead when a core of this node died, stopped answering, or has work but makes no progress."""
        if self.coordinator is not None:
            self.coordinator.check()
        for client in self.node_clients:
            client.check()

    async def reset_prefix_cache(self) -> None:
        for client in [*self.node_clients, *self._remote.values()]:
            await client.send(ResetPrefixCache())

    # ---- sleep ----

    async def sleep(self, level: int, mode: Mode) -> None:
        """Puts all cores to sleep, or none: if one cannot sleep, the others are woken again. Raises as `CoreClient.sleep`."""
        cores = self.connected
        awake = [core for core in cores if not core.sleep_state.asleep]
        outcomes = await asyncio.gather(*(core.sleep(level, mode) for core in cores), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            slept = [core for core, outcome in zip(cores, outcomes, strict=True) if outcome is None and core in awake]
            await asyncio.gather(*(core.wake_up(list(TAGS)) for core in slept), return_exceptions=True)
            raise failures[0]

    async def wake_up(self, tags: list[Tag]) -> None:
        """Wakes all cores that can wake, even if others fail. Raises as `CoreClient.wake_up`."""
        outcomes = await asyncio.gather(*(core.wake_up(tags) for core in self.connected), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    @property
    def sleep_level(self) -> int:
        """The least level at which a core sleeps; 0 while one is awake, or there is none."""
        return min((core.sleep_state.level for core in self.serving), default=0)

    # ---- reports ----

    @property
    def any_serving(self) -> bool:
        return bool(self._hellos)

    @property
    def stats(self) -> Stats:
        """The newest counters of this node's cores, summed."""
        total = Stats()
        for each in (self.local.past, *(client.stats for client in self.node_clients)):
            add_stats(total, each)
        return total

    @property
    def ledger(self) -> str:
        """The memory plan of each core, for people."""
        return "\n".join(str(hello.ledger) for hello in self._hellos)

    @property
    def memory(self) -> Ledger:
        """The memory of one rank, as allocated."""
        return self._hellos[0].ledger

    @property
    def kv_tokens(self) -> int:
        """The longest sequence that one core's KV cache can hold."""
        return min(hello.max_tokens for hello in self._hellos)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that every core can hold."""
        return min((hello.max_tokens_per_request for hello in self._hellos), default=self._config.scheduler.max_model_len)

    @property
    def membership(self) -> EpochMembership:
        """Epoch, layout and worker ids of the ranks that step now. Each core is one data parallel rank.

        Cores that share experts have one common membership.
        """
        each = [hello.membership for hello in self._hellos]
        if self._config.worker.dp_sync:
            return max(each, key=lambda membership: membership.epoch)
        layout = replace(each[0].layout, data=len(each))
        return EpochMembership(each[0].epoch, layout, tuple(range(layout.world_size)))

    @property
    def _hellos(self) -> list[Hello]:
        """Hellos of the cores that serve."""
        remote = [client for client in self._remote.values() if client.failure is None]
        return [client.hello for client in [*self.node_clients, *remote] if client.hello is not None and client.taking]

    @property
    def processes(self) -> list[CoreHandle]:
        """Processes of the local cores."""
        return self.local.processes

    @property
    def addresses(self) -> list[str]:
        """Addresses at which further frontends can `attach`."""
        return [process.address for process in self.processes]

    @property
    def advertised_addresses(self) -> list[str]:
        """Addresses of this node's cores for frontends of other nodes, in the cores' order."""
        return [client.hello.address for client in self.node_clients if client.hello is not None]

    @property
    def start_seconds(self) -> list[list[dict[str, float]]]:
        """Seconds of each step of the start: for each local core, by rank."""
        return [client.hello.start_seconds for client in self.local.clients if client.hello is not None]


async def _close_when_idle(client: CoreClient) -> None:
    while not client.idle and client.failure is None:  # noqa: ASYNC110 - an event would have to be set wherever a request ends
        await asyncio.sleep(IDLE_POLL_SECONDS)
    await client.close()
