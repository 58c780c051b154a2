"""The engine cores that a frontend sends requests to: which there are, which one is next, and what they say of themselves."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import zmq.asyncio

from starling_engine.config import EngineConfig
from starling_engine.core.client import CoreClient
from starling_engine.core.launcher import CoreHandle
from starling_engine.core.messages import Hello, ResetPrefixCache
from starling_engine.delta import Stats, add
from starling_engine.elastic.coordinator import Coordinator
from starling_engine.errors import EngineAsleep, EngineDead
from starling_engine.frontend.balance import Balancer
from starling_engine.frontend.own_cores import LocalCores
from starling_engine.ledger import Ledger
from starling_engine.sleep import ASLEEP
from starling_engine.topology.layout import EpochMembership

LEAVING_LOOK_SECONDS = 0.2


class CoreClients:
    """Those that this frontend started (`own`), those that it attached to, and those of other nodes, which come and go.

    Lives on the event loop that made it.
    """

    def __init__(self, config: EngineConfig, host: str | None = None) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self.own = LocalCores(self._context, config, host)
        self.coordinator: Coordinator | None = None
        """Of own cores that hold the experts among them."""
        self._attached: list[CoreClient] = []
        self._others: dict[str, CoreClient] = {}
        """Cores of other nodes, by name."""
        self._leaving: dict[asyncio.Task[None], CoreClient] = {}
        self._balancer = Balancer()

    # ---- which there are ----

    async def attach(self, addresses: Sequence[str]) -> None:
        """To cores that run already. Raises EngineDead when one does not answer."""
        names = [f"engine core {i}" for i in range(len(addresses))] if len(addresses) > 1 else ["the engine core"]
        self._attached = [self._client(name, address) for name, address in zip(names, addresses, strict=True)]
        for client in self._attached:
            await client.connect()

    async def add(self, name: str, address: str) -> None:
        """Connects to a core that is ready; requests may go there from now on, and errors call it `name`, which must be new.

        Cores of this node are preferred where the load is equal. Raises EngineDead when it does not answer.
        """
        assert name not in self._others, f"{name} is there already"
        client = self._client(name, address)
        try:
            await client.connect()
        except BaseException:
            await client.close()
            raise
        self._others[name] = client

    def remove(self, name: str) -> None:
        """No more request goes there; those that are there go on to their end."""
        client = self._others.pop(name)
        task = asyncio.create_task(_close_when_idle(client))
        self._leaving[task] = client
        task.add_done_callback(self._leaving.pop)

    def _client(self, name: str, address: str) -> CoreClient:
        return CoreClient(self._context, address, self._config.progress_timeout, name=name)

    async def close(self) -> None:
        """Ends the cores that were started here; open requests end with them."""
        leaving = dict(self._leaving)
        for task in leaving:
            task.cancel()
        for client in [*self._attached, *self._others.values(), *leaving.values()]:
            await client.close()
        await self.own.end(self.own.clients)
        self._context.term()

    @property
    def others(self) -> dict[str, str | None]:
        """The cores that were added, by name, each with why it failed. One that failed gets no request until it is added anew."""
        return {name: client.failure for name, client in self._others.items()}

    @property
    def here(self) -> list[CoreClient]:
        """All but those of other nodes."""
        if self.coordinator is not None:
            return [member.client for member in self.coordinator.members]
        return self.own.clients + self._attached

    @property
    def serving(self) -> list[CoreClient]:
        """Those, awake or not, that take part."""
        return [client for client in (*self.here, *self._others.values()) if client.taking]

    @property
    def connected(self) -> list[CoreClient]:
        """`serving`. Raises EngineDead when there is none."""
        cores = self.serving
        if not cores:
            raise EngineDead("no engine core is connected")
        return cores

    def choose(self, ids: list[int], cache_salt: str | None = None) -> CoreClient:
        """The core for that prompt. Raises EngineDead or EngineAsleep when none takes requests."""
        cores = [client for client in self.connected if client.sleep_state.taking]
        if not cores:
            raise EngineAsleep(ASLEEP)
        return cores[self._balancer.choose(cores, ids, cache_salt)]

    def check(self) -> None:
        """Raises EngineDead when a core here died, stopped answering, or has work but makes no progress. Added ones: `others`."""
        if self.coordinator is not None:
            self.coordinator.check()
        for client in self.here:
            client.check()

    async def reset_prefix_cache(self) -> None:
        for client in [*self.here, *self._others.values()]:
            await client.send(ResetPrefixCache())

    # ---- what they say of themselves ----

    @property
    def any_serving(self) -> bool:
        return bool(self._hellos)

    @property
    def stats(self) -> Stats:
        """The newest counters, summed; those of cores of other nodes are counted there."""
        total = Stats()
        for each in (self.own.past, *(client.stats for client in self.here)):
            add(total, each)
        return total

    @property
    def ledger(self) -> str:
        """The memory plan of each core, for people."""
        return "\n".join(str(hello.ledger) for hello in self._hellos)

    @property
    def memory(self) -> Ledger:
        """The memory of one rank as it was allocated."""
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
        """Epoch, layout and worker ids of the ranks that step now, as the cores gave them: each is one data parallel rank.

        Those that share experts have one membership among them.
        """
        each = [hello.membership for hello in self._hellos]
        if self._config.worker.lockstep:
            return max(each, key=lambda membership: membership.epoch)
        layout = replace(each[0].layout, data=len(each))
        return EpochMembership(each[0].epoch, layout, tuple(range(layout.world_size)))

    @property
    def _hellos(self) -> list[Hello]:
        """Of the cores that serve."""
        others = [client for client in self._others.values() if client.failure is None]
        return [client.hello for client in [*self.here, *others] if client.hello is not None and client.taking]

    @property
    def processes(self) -> list[CoreHandle]:
        """Of the cores that were started here."""
        return self.own.processes

    @property
    def addresses(self) -> list[str]:
        """Where further frontends can `attach`."""
        return [process.address for process in self.processes]

    @property
    def reachable(self) -> list[str]:
        """Where frontends of other nodes can reach the cores that were started here, in their order."""
        return [client.hello.address for client in self.here if client.hello is not None]

    @property
    def start_seconds(self) -> list[list[dict[str, float]]]:
        """How long each step of each rank's start took: of the cores that were started here, each core's by rank."""
        return [client.hello.start_seconds for client in self.own.clients if client.hello is not None]


async def _close_when_idle(client: CoreClient) -> None:
    while not client.idle and client.failure is None:  # noqa: ASYNC110 - an event would have to be set wherever a request ends
        await asyncio.sleep(LEAVING_LOOK_SECONDS)
    await client.close()
