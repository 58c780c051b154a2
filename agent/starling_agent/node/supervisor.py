"""The node's life as a small machine: prepare, then load, prove, serve; after a failure again, or give up.

starting -> downloading -> verifying -> loading -> warming -> serving
                                           ^                     |
                                           +---- restarting <----+      failed: out of restarts, or none can help
                                                                        draining: from anywhere, for good
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Never

import structlog
from starling_engine import AsyncEngine, EngineArgs
from starling_engine.core.messages import Loading
from starling_engine.errors import EngineDead, StarlingError

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.group import GroupView
from starling_agent.contract.identity import Identity
from starling_agent.group.connections import Connections
from starling_agent.group.local_share import LocalShare
from starling_agent.group.resizing import ReportedResizer
from starling_agent.node.digest import weights_digest
from starling_agent.node.engine_args import engine_args
from starling_agent.node.failures import NodeFailure, fatal, passing
from starling_agent.node.first_token import FirstToken
from starling_agent.node.pin import Pin, pinned
from starling_agent.node.progress import ProgressTeller
from starling_agent.node.readback import nothing_left, read_back
from starling_agent.node.recovery import Restart, after_failure
from starling_agent.node.refusals import refusal
from starling_agent.node.sleep_admin import SleepAdmin
from starling_agent.node.switchable_app import SwitchableApp
from starling_agent.node.weights import obtain
from starling_agent.report_state import ReportState
from starling_agent.server.collector import keep_for_good

WATCH_SECONDS = 0.2
LOADING_SILENCE_SECONDS = 600.0
"""A load that does nothing new for so long hangs. Building kernels and warming up may take minutes without a word."""
log = structlog.get_logger("starling.agent")

Failure = (StarlingError, NodeFailure, OSError)
"""What an engine's life may end with; anything else is a fault of ours and ends the process."""


class Supervisor:
    """Decides nothing by itself: see `refusals`, `recovery`. `leave` ends the endpoint's server."""

    def __init__(
        self,
        config: AgentConfig,
        identity: Identity,
        state: ReportState,
        part: LocalShare,
        resizing: ReportedResizer | None,
        door: SwitchableApp,
        token: FirstToken,
        own_url: str,
        leave: Callable[[], None],
        bed: SleepAdmin,
        pin: Pin,
    ) -> None:
        self._config = config
        self._identity = identity
        self._state = state
        self._part = part
        self._engine: AsyncEngine | None = None
        self._lost: str | None = None
        """Why the newest core of another node was lost."""
        self._resizing = resizing
        self._door = door
        self._token = token
        self._own_url = own_url
        self._leave = leave
        self._bed = bed
        self._pin = pin
        self._progress = ProgressTeller(state)
        self._restarts: list[float] = []
        self._served = False
        self._proven = False
        """A token has come through the engine that is there now."""
        self._takes_part = True
        """Whether the group is to have this node."""
        self._service: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Why this node cannot go on; None while it can."""

    async def run(self) -> Never:
        """Until it is cancelled; the engine has ended by then."""
        try:
            await self._run_engines()
        except NodeFailure as failure:
            self._failed(failure)
            await asyncio.Event().wait()
            raise AssertionError("nobody sets this") from None
        finally:
            if self._service is not None:
                self._service.cancel()

    def drain_begun(self) -> None:
        """Unready at once. Without an engine there is nothing to wait for."""
        self._state.update(phase="draining", ready=False, progress=None)
        membership = self._part.membership
        membership.drain()
        # Nodes of one group are often told to go together: until none accepts any more, each needs the others' cores.
        asyncio.get_running_loop().call_later(self._config.drain.accept_seconds, membership.stop_taking)
        if not self._door.is_open:
            self._leave()

    async def finish_for_others(self) -> None:
        """As `LocalShare` has it."""
        await self._part.finish_for_others(self._engine)

    async def _run_engines(self) -> Never:
        args = await self._prepare()
        workers = asyncio.create_task(self._part.workers.keep())
        try:
            while True:
                restart = await self._one_engine(args)
                await asyncio.sleep(restart.delay)
        finally:
            workers.cancel()
            await asyncio.gather(workers, return_exceptions=True)

    async def _prepare(self) -> EngineArgs:
        """What can be refused is refused before gigabytes are fetched."""
        refused = refusal(self._config, self._identity)
        if refused is not None:
            raise fatal(refused)
        args = engine_args(self._config)
        model = await pinned(self._config.model, self._pin, self._state)
        folder = await obtain(model, self._progress.tell, lambda cause: self._state.update(last_error=cause))
        commit = folder.name if model.source.startswith("hf://") else None
        self._state.update(commit=commit, weights=await asyncio.to_thread(weights_digest, folder))
        return dataclasses.replace(args, model=str(folder))

    async def _one_engine(self, args: EngineArgs) -> Restart:
        """From its start to its end, and what is to be done then. Raises NodeFailure when it was the last."""
        try:
            engine = await self._load(args)
        except Failure as error:
            self._part.withdraw()
            return self._down(error)
        try:
            await self._serve(engine)
        except Failure as error:
            return self._down(error)
        finally:
            self._engine = self._bed.engine = None
            self._part.withdraw()
            self._door.close()
            await engine.shutdown()

    async def _load(self, args: EngineArgs) -> AsyncEngine:
        self._progress.tell("loading")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LOADING_SILENCE_SECONDS) as limit:

                def on_phase(loading: Loading) -> None:
                    limit.reschedule(loop.time() + LOADING_SILENCE_SECONDS)
                    self._progress.loading(loading)
                    if loading.joining != self._part.joining:
                        self._part.invite(loading.joining)

                return await AsyncEngine.start(args, on_phase, self._part.here)
        except TimeoutError:
            raise passing(f"the engine made no progress for {LOADING_SILENCE_SECONDS:g} s while it loaded") from None

    async def _serve(self, engine: AsyncEngine) -> Never:
        """Ready only when a token has come through; then until the engine fails."""
        self._engine = engine
        connections = Connections(
            *(engine, self._part),
            changed=lambda cause: self._cores_changed(engine, cause),
            seen=lambda view: self._size_seen(engine, view),
        )
        self._part.publish(engine)
        watch = asyncio.create_task(self._until_dead(engine))
        follow = asyncio.create_task(connections.follow())
        proof = asyncio.create_task(self._prove(engine, connections))
        lead = [] if self._resizing is None else [asyncio.create_task(self._resizing.lead(engine))]
        try:
            await _one_of(watch, follow, proof, *lead)
            self._ready()
            self._bed.engine = engine
            await _one_of(watch, follow, *lead)
            raise AssertionError("a watch ends only by raising")
        finally:
            self._proven = False
            for task in (watch, follow, proof, *lead):
                task.cancel()
            await asyncio.gather(watch, follow, proof, *lead, return_exceptions=True)

    def _size_seen(self, engine: AsyncEngine, view: GroupView) -> None:
        """A node that the group is to do without, or that loses another one, takes no new requests; its open streams go on."""
        if self._proven and engine.cores.any_serving:
            self._takes_part = self._part.takes_part(view.target) and not self._part.is_losing_workers(view)
            self._state.update(**self._readiness(engine), **read_back(engine))

    def _readiness(self, engine: AsyncEngine) -> dict[str, Any]:
        return {"ready": self._takes_part and engine.is_awake, "asleep": engine.is_sleeping}

    async def _prove(self, engine: AsyncEngine, connections: Connections) -> None:
        if engine.cores.any_serving:
            self._state.update(phase="warming", progress=None)
        await connections.complete.wait()
        self._door.open(engine)
        self._state.update(phase="warming", progress=None, **read_back(engine))
        await self._token.insist(self._own_url)

    async def _until_dead(self, engine: AsyncEngine) -> Never:
        """Raises EngineDead. A node without a core of its own is dead when it has lost the last one, unless it goes anyway."""
        while True:
            engine.check_health()
            if self._door.is_open and not engine.cores.any_serving and not self._door.drain.draining:
                raise EngineDead(self._lost or "no engine core of the group takes requests now")
            if self._proven and engine.cores.any_serving:
                self._state.update(**self._readiness(engine))
            await asyncio.sleep(WATCH_SECONDS)

    def _cores_changed(self, engine: AsyncEngine, cause: str | None) -> None:
        self._lost = cause or self._lost
        if self._door.is_open and engine.cores.any_serving:
            self._state.update(**read_back(engine), **({} if cause is None else {"last_error": cause}))

    def _ready(self) -> None:
        keep_for_good()
        self._served = self._proven = True
        self._state.update(phase="serving", token_seen=True, ready=True)
        url = self._config.endpoint.service_url
        if url is not None and self._service is None:
            tell = lambda seen: self._state.update(service_token_seen=seen)  # noqa: E731
            self._service = asyncio.create_task(self._token.until_seen(url, tell))

    def _down(self, error: Exception) -> Restart:
        """Tells it at once, before the engine is cleared away. Raises NodeFailure when there is to be no other start."""
        now, cause = time.monotonic(), str(error)
        self._state.update(progress=None, ready=False, asleep=False, token_seen=False, **nothing_left(self._state.report, cause))
        if self._door.drain.draining:
            self._leave()
            raise passing(cause)
        decision = after_failure(error, served=self._served, restarts=self._restarts, now=now, recovery=self._config.recovery)
        if not isinstance(decision, Restart):
            raise NodeFailure(cause, fatal=decision.fatal)
        log.error("the engine failed", cause=cause, restart_in=decision.delay)
        self._restarts.append(now)
        self._state.update(phase="restarting", engine_restarts=len(self._restarts))
        return decision

    def _failed(self, failure: NodeFailure) -> None:
        self.failure = str(failure)
        log.error("failed", cause=self.failure, fatal=failure.fatal)
        self._state.update(phase="failed", progress=None, ready=False, healthy=False, fatal=failure.fatal, last_error=self.failure)


async def _one_of(*tasks: asyncio.Task[Any]) -> None:
    """Until one of them ends. Raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
