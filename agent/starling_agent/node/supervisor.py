"""The supervisor of a node's engine: prepare, then load, get a first token, serve; after a failure again, or give up.

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
from starling_agent.group.connections import CoreConnections
from starling_agent.group.local_share import LocalShare
from starling_agent.group.size_controller import SizeController
from starling_agent.node.admin import SleepRoutes
from starling_agent.node.configuration import layout_error
from starling_agent.node.engine_args import engine_args
from starling_agent.node.engine_report import report_of_engine, report_without_engine
from starling_agent.node.failures import NodeFailure, fatal, transient
from starling_agent.node.first_token import FirstToken, wanted_of
from starling_agent.node.pinned_commit import PinnedCommit, pinned
from starling_agent.node.progress import ProgressReporter
from starling_agent.node.recovery import Restart, after_failure
from starling_agent.node.switchable_app import SwitchableApp
from starling_agent.node.weights import commit_of, obtain, weights_digest
from starling_agent.report_state import ReportState
from starling_agent.server.process_memory import collect_rarely

WATCH_SECONDS = 0.2
LOADING_SILENCE_SECONDS = 600.0
"""A load without progress for this long hangs. Building kernels and warming up may take minutes without any."""
log = structlog.get_logger("starling.agent")

EXPECTED_ERRORS = (StarlingError, NodeFailure, OSError)
"""Errors that an engine may end with; any other is a bug and ends the process."""


class Supervisor:
    """Runs one engine after the other; `recovery` decides what follows a failure. `stop_serving` ends the endpoint's server."""

    def __init__(
        self,
        config: AgentConfig,
        identity: Identity,
        state: ReportState,
        local_share: LocalShare,
        size_controller: SizeController | None,
        app: SwitchableApp,
        token: FirstToken,
        local_url: str,
        stop_serving: Callable[[], None],
        sleep_routes: SleepRoutes,
        pinned_commit: PinnedCommit,
    ) -> None:
        self._config = config
        self._identity = identity
        self._state = state
        self._local_share = local_share
        self._engine: AsyncEngine | None = None
        self._lost_core: str | None = None
        """Cause for which the last core of another node was lost."""
        self._size_controller = size_controller
        self._app = app
        self._token = token
        self._local_url = local_url
        self._stop_serving = stop_serving
        self._sleep_routes = sleep_routes
        self._pinned_commit = pinned_commit
        self._progress = ProgressReporter(state)
        self._restarts: list[float] = []
        self._served = False
        self._first_token_seen = False
        """True once a token has come from the engine that runs now."""
        self._accepts = True
        """False while the group is about to shrink to a size without this node, or it would lose workers."""
        self._service_check: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Cause for which this node cannot go on; None while it can."""

    async def run(self) -> Never:
        """Runs until cancelled; the engine has ended then."""
        try:
            await self._run_engines()
        except NodeFailure as failure:
            self._fail(failure)
            await asyncio.Event().wait()
            raise AssertionError("nobody sets this") from None
        finally:
            if self._service_check is not None:
                self._service_check.cancel()

    def begin_drain(self) -> None:
        """Makes the node unready at once. Without an engine it ends without waiting."""
        self._state.update(phase="draining", ready=False, progress=None)
        self._local_share.membership.drain()
        if not self._app.is_open:
            self._stop_serving()

    async def finish_for_others(self) -> None:
        """Waits as LocalShare.finish_for_others does."""
        await self._local_share.finish_for_others(self._engine)

    async def _run_engines(self) -> Never:
        args = await self._prepare()
        workers = asyncio.create_task(self._local_share.workers.run())
        try:
            while True:
                restart = await self._run_engine(args)
                await asyncio.sleep(restart.delay)
        finally:
            workers.cancel()
            await asyncio.gather(workers, return_exceptions=True)

    async def _prepare(self) -> EngineArgs:
        """Refuses what can be refused, then downloads the model. Raises NodeFailure."""
        wrong = layout_error(self._config, self._identity)
        if wrong is not None:
            raise fatal(wrong)
        args = engine_args(self._config)
        model = await pinned(self._config.model, self._pinned_commit, self._state)
        path = await obtain(model, self._progress.report, lambda cause: self._state.update(last_error=cause))
        digest = await asyncio.to_thread(weights_digest, path, args.quantization)
        self._state.update(commit=commit_of(model, path), weights=digest)
        return dataclasses.replace(args, model=str(path))

    async def _run_engine(self, args: EngineArgs) -> Restart:
        """Runs an engine to its end. Raises NodeFailure when there is to be no other one."""
        try:
            engine = await self._load(args)
        except EXPECTED_ERRORS as error:
            self._local_share.withdraw()
            return self._after_failure(error)
        try:
            await self._serve(engine)
        except EXPECTED_ERRORS as error:
            return self._after_failure(error)
        finally:
            self._engine = self._sleep_routes.engine = None
            self._local_share.withdraw()
            self._app.close()
            await engine.shutdown()

    async def _load(self, args: EngineArgs) -> AsyncEngine:
        self._progress.report("loading")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LOADING_SILENCE_SECONDS) as limit:

                def on_phase(loading: Loading) -> None:
                    limit.reschedule(loop.time() + LOADING_SILENCE_SECONDS)
                    self._progress.loading(loading)
                    if loading.joining != self._local_share.joining:
                        self._local_share.publish_joining(loading.joining)

                return await AsyncEngine.start(args, on_phase, self._local_share.placement)
        except TimeoutError:
            raise transient(f"the engine made no progress for {LOADING_SILENCE_SECONDS:g} s while it loaded") from None

    async def _serve(self, engine: AsyncEngine) -> Never:
        """Serves until the engine fails. The node is ready only once a token has come through its endpoint."""
        self._engine = engine
        connections = CoreConnections(
            engine,
            self._local_share,
            on_change=lambda cause: self._on_cores_changed(engine, cause),
            on_view=lambda view: self._on_view(engine, view),
        )
        self._local_share.publish(engine)
        loops = [asyncio.create_task(self._watch(engine)), asyncio.create_task(connections.run())]
        if self._size_controller is not None:
            loops.append(asyncio.create_task(self._size_controller.run(engine)))
        first_token = asyncio.create_task(self._get_first_token(engine, connections))
        try:
            await _first_of(first_token, *loops)
            self._become_ready()
            self._sleep_routes.engine = engine
            loops.append(asyncio.create_task(self._follow_standby(engine)))
            await _first_of(*loops)
            raise AssertionError("these loops end only by raising")
        finally:
            self._first_token_seen = False
            for task in (first_token, *loops):
                task.cancel()
            await asyncio.gather(first_token, *loops, return_exceptions=True)

    async def _follow_standby(self, engine: AsyncEngine) -> Never:
        await self._sleep_routes.standby.follow(engine, lambda cause: self._state.update(last_error=cause))

    def _on_view(self, engine: AsyncEngine, view: GroupView) -> None:
        """Stops new requests while the group shrinks to a size without this node, or loses workers. Open streams go on."""
        if self._first_token_seen and engine.cores.any_serving:
            self._accepts = self._local_share.is_within(view.target) and not self._local_share.is_losing_workers(view)
            self._state.update(**self._readiness(engine), **report_of_engine(engine))

    def _readiness(self, engine: AsyncEngine) -> dict[str, Any]:
        return {"ready": self._accepts and engine.is_awake, "asleep": engine.is_sleeping}

    async def _get_first_token(self, engine: AsyncEngine, connections: CoreConnections) -> None:
        if engine.cores.any_serving:
            self._state.update(phase="warming", progress=None)
        await connections.complete.wait()
        self._app.open(engine)
        self._state.update(phase="warming", progress=None, **report_of_engine(engine))
        self._token.wanted = wanted_of(engine.model_config)
        await self._token.require(self._local_url)

    async def _watch(self, engine: AsyncEngine) -> Never:
        """Raises EngineDead when the engine is dead, or no core takes requests any more and the node does not drain."""
        while True:
            engine.check_health()
            if self._app.is_open and not engine.cores.any_serving and not self._app.drain.draining:
                raise EngineDead(self._lost_core or "no engine core of the group takes requests now")
            if self._first_token_seen and engine.cores.any_serving:
                self._state.update(**self._readiness(engine))
            await asyncio.sleep(WATCH_SECONDS)

    def _on_cores_changed(self, engine: AsyncEngine, cause: str | None) -> None:
        self._lost_core = cause or self._lost_core
        if self._app.is_open and engine.cores.any_serving:
            self._state.update(**report_of_engine(engine), **({} if cause is None else {"last_error": cause}))

    def _become_ready(self) -> None:
        collect_rarely()
        self._served = self._first_token_seen = True
        self._state.update(phase="serving", token_seen=True, ready=True)
        url = self._config.endpoint.service_url
        if url is not None and self._service_check is None:
            on_result = lambda seen: self._state.update(service_token_seen=seen)  # noqa: E731
            self._service_check = asyncio.create_task(self._token.until_seen(url, on_result))

    def _after_failure(self, error: Exception) -> Restart:
        """Reports the failure at once, before the engine's shutdown. Raises NodeFailure when there is to be no other start."""
        now, cause = time.monotonic(), str(error)
        self._state.update(
            progress=None, ready=False, asleep=False, token_seen=False, **report_without_engine(self._state.report, cause)
        )
        if self._app.drain.draining:
            self._stop_serving()
            raise transient(cause)
        decision = after_failure(error, served=self._served, restarts=self._restarts, now=now, recovery=self._config.recovery)
        if not isinstance(decision, Restart):
            raise NodeFailure(cause, fatal=decision.fatal)
        log.error("the engine failed", cause=cause, restart_in=decision.delay)
        self._restarts.append(now)
        self._state.update(phase="restarting", engine_restarts=len(self._restarts))
        return decision

    def _fail(self, failure: NodeFailure) -> None:
        self.failure = str(failure)
        log.error("failed", cause=self.failure, fatal=failure.fatal)
        self._state.update(phase="failed", progress=None, ready=False, healthy=False, fatal=failure.fatal, last_error=self.failure)


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Waits until one of the tasks ends. Raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
