"""Puts a node together and runs it to its end."""

import asyncio
import contextlib
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from starling_engine import EngineArgs
from starling_engine.errors import ConfigError

from starling_agent.api_keys import ApiKeys
from starling_agent.contract.config import AdminConfig, AgentConfig, EndpointConfig
from starling_agent.contract.identity import Identity
from starling_agent.contract.report import Report
from starling_agent.contract.router import router_token
from starling_agent.file_token import FileToken
from starling_agent.group.leader import RemoteMembershipService
from starling_agent.group.leader_parts import LeaderParts, make_leader_parts
from starling_agent.group.local_share import LocalShare
from starling_agent.group.membership import GroupMembership, make_member
from starling_agent.http.open_requests import OpenRequests
from starling_agent.metrics.exporter import CacheShape
from starling_agent.node.admin import SleepRoutes, create_admin
from starling_agent.node.certificates import watch_certificate
from starling_agent.node.configuration import Configuration
from starling_agent.node.drain_deadline import DrainDeadline
from starling_agent.node.failures import FAILED_EXIT_CODE
from starling_agent.node.first_token import FirstToken, local_url
from starling_agent.node.pinned_commit import PinnedCommit
from starling_agent.node.secrets import wait_for_secrets
from starling_agent.node.supervisor import Supervisor
from starling_agent.node.switchable_app import SwitchableApp
from starling_agent.report_state import ReportState
from starling_agent.routers_only import RoutersOnly
from starling_agent.server.http_server import BACKLOG, HttpServer, bind
from starling_agent.server.signals import SignalShutdown
from starling_agent.settings import RateLimit, ServerSettings, Tls
from starling_agent.version import starling_version

ADMIN_END_SECONDS = 3.0
COUNT_SECONDS = 1.0
log = structlog.get_logger("starling.agent")


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """`cause` is there when the code is not 0."""

    code: int
    cause: str | None = None


async def run_node(configuration: Configuration, identity: Identity) -> ExitStatus:
    """Runs until a signal. Raises ConfigError when the admin endpoint cannot listen."""
    open_requests = OpenRequests()
    state = ReportState(first_report(configuration, identity), lambda: len(open_requests))
    config = configuration.config
    leader_parts = make_leader_parts(config, identity, state) if config is not None else None
    sleep_routes, pinned_commit = SleepRoutes(), PinnedCommit(_path(config.model.pin_file) if config is not None else None)
    deadline = DrainDeadline()
    of_routers = FileToken(Path(configuration.admin.token_file), router_token)
    routers_only = _routers_only(config.endpoint, of_routers) if config is not None else None
    async with _admin_server(
        configuration.admin, state, leader_parts, identity.leader, sleep_routes, pinned_commit, deadline, routers_only
    ):
        if config is None:
            return await _stay_failed(state, configuration.error or "")
        try:
            if not await wait_for_secrets(config.endpoint, state):
                return ExitStatus(0)
            settings = replace(_settings(config, identity), router_token=of_routers, routers_only=routers_only)
            node = _Node(config, settings, identity, state, open_requests, leader_parts, sleep_routes, pinned_commit, of_routers)
            deadline.end = node.end_streams
        except ConfigError as error:
            return await _stay_failed(state, f"endpoint.{error}")
        with contextlib.closing(node.listener):
            return await node.run()


def _routers_only(endpoint: EndpointConfig, token: FileToken) -> RoutersOnly:
    return RoutersOnly(token, endpoint.connection_seconds, closed=endpoint.routers_only)


def first_report(configuration: Configuration, identity: Identity) -> Report:
    return Report(
        version=1,
        incarnation=uuid.uuid4().hex,
        agent=starling_version(),
        config_hash=configuration.hash,
        service=configuration.service,
        revision=configuration.revision,
        group=identity.group,
        node=identity.node,
        pod=identity.pod,
        phase="starting",
        leader=identity.node == 0,
    )


@contextlib.asynccontextmanager
async def _admin_server(
    admin: AdminConfig,
    state: ReportState,
    leader_parts: LeaderParts | None,
    leader_address: str,
    sleep_routes: SleepRoutes,
    pinned_commit: PinnedCommit,
    deadline: DrainDeadline,
    routers_only: RoutersOnly | None,
) -> AsyncIterator[None]:
    """Serves the admin endpoint before everything else starts, and until after it has ended."""
    try:
        listener = bind(admin.host, admin.port)
    except ConfigError as error:
        raise ConfigError(f"admin.{error}") from None
    leader, operations = (leader_parts.leader, leader_parts.operations) if leader_parts is not None else (None, None)
    token = FileToken(Path(admin.token_file))
    app = create_admin(state, token, leader, leader_address, operations, sleep_routes, pinned_commit, deadline, routers_only)
    server = HttpServer(app)
    with contextlib.closing(listener):
        listener.listen(BACKLOG)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            state.close()
            if leader is not None:
                leader.close()
            server.should_exit = True
            await asyncio.wait((serving,), timeout=ADMIN_END_SECONDS)
            server.force_exit = True
            await serving


async def _stay_failed(state: ReportState, cause: str) -> ExitStatus:
    """Waits for a signal: no restart helps. The operator reads the cause, and ends this pod when it has another configuration."""
    log.error("failed", cause=cause, fatal=True)
    state.update(phase="failed", healthy=False, fatal=True, last_error=cause)
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    await signalled.wait()
    return ExitStatus(FAILED_EXIT_CODE, cause)


class _Node:
    """The endpoint and the supervisor of its engine. Raises ConfigError naming a field of the configuration's `endpoint`."""

    def __init__(
        self,
        config: AgentConfig,
        settings: ServerSettings,
        identity: Identity,
        state: ReportState,
        open_requests: OpenRequests,
        leader_parts: LeaderParts | None,
        sleep_routes: SleepRoutes,
        pinned_commit: PinnedCommit,
        of_routers: FileToken,
    ) -> None:
        endpoint = config.endpoint
        self._tls = _tls(config)
        given = config.engine.get
        cache = CacheShape(given("block_size", EngineArgs.block_size), given("kv_cache_dtype", EngineArgs.kv_cache_dtype))
        times = [leader_parts.operations.times] if leader_parts is not None else []
        app = SwitchableApp(settings, state, open_requests, cache, *times)
        self._state = state
        self._open_requests = open_requests
        self._drain = app.drain
        self._background = app.background
        self._server = HttpServer(app, self._tls, settings.read_seconds, settings.connection_seconds, app.metrics.responses)
        self.listener = bind(endpoint.host, endpoint.port)
        url = local_url(endpoint.host, self.listener.getsockname()[1], tls=self._tls is not None)
        token = FirstToken(settings.served_model_names[0], lambda: settings.api_keys.first, identity.pod, of_routers)
        self._leader = leader_parts.leader if leader_parts is not None else None
        service = self._leader or RemoteMembershipService(identity.leader, Path(config.admin.token_file))
        member = make_member(config, identity, state.report)
        self._membership = GroupMembership(service, member, self._on_membership_status)
        self._supervisor = Supervisor(
            config,
            identity,
            state,
            LocalShare(config, identity, self._membership),
            leader_parts.size_controller if leader_parts is not None else None,
            app,
            token,
            url,
            self._stop_serving,
            sleep_routes,
            pinned_commit,
        )
        self._shutdown = SignalShutdown(
            self._server,
            settings,
            app.drain,
            open_requests,
            self._supervisor.begin_drain,
            # All nodes of a group often drain together: requests that come to this one may need the others' cores, too.
            on_closed=self._membership.stop_accepting,
        )

    async def run(self) -> ExitStatus:
        self._shutdown.listen()
        serving = asyncio.create_task(self._server.serve(sockets=[self.listener]))
        supervising = asyncio.create_task(self._supervisor.run())
        helpers = [asyncio.create_task(self._count_streams()), asyncio.create_task(self._membership.run())]
        if self._leader is not None:
            helpers.append(asyncio.create_task(self._leader.watch()))
        if self._tls is not None:
            helpers.append(asyncio.create_task(watch_certificate(self._server, self._tls)))
        try:
            done, _ = await asyncio.wait((serving, supervising, *helpers), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # all but the server end only by a bug, which is raised here
            await self._background.finish(self._shutdown.drain_over)
            await self._finish_for_others()
        finally:
            self._server.should_exit = self._server.force_exit = True
            for other in (supervising, *helpers):
                other.cancel()
            await asyncio.gather(serving, supervising, *helpers, return_exceptions=True)
        return self._exit_status()

    def end_streams(self) -> None:
        """Ends all open streams at once, each with an error event."""
        self._shutdown.end_now()

    async def _finish_for_others(self) -> None:
        """Waits for requests that frontends of other nodes have here, as long as for local clients."""
        tasks = [asyncio.create_task(self._supervisor.finish_for_others()), asyncio.create_task(self._shutdown.drain_over.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    def _on_membership_status(self, cause: str | None) -> None:
        """Reports why this node is not in its group, unless it has failed: that cause stays in the report."""
        if self._supervisor.failure is None:
            self._state.update(last_error=cause)

    def _stop_serving(self) -> None:
        self._server.should_exit = True

    async def _count_streams(self) -> None:
        """Reports the number of open streams while the node drains: the operator waits for it to fall."""
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            if self._drain.draining:
                self._state.update(open_streams=len(self._open_requests))

    def _exit_status(self) -> ExitStatus:
        if self._supervisor.failure is not None:
            return ExitStatus(FAILED_EXIT_CODE, self._supervisor.failure)
        if self._shutdown.exit_code:
            return ExitStatus(self._shutdown.exit_code, "ended before all open requests had finished")
        return ExitStatus(0)


def _settings(config: AgentConfig, identity: Identity) -> ServerSettings:
    endpoint, drain, rate = config.endpoint, config.drain, config.endpoint.rate_limit
    return ServerSettings(
        host=endpoint.host,
        port=endpoint.port,
        served_model_names=tuple(config.model.served_names),
        api_keys=ApiKeys((), _path(endpoint.api_key_file)),
        allowed_origins=tuple(endpoint.allowed_origins),
        allowed_hosts=tuple(endpoint.allowed_hosts),
        prefix_cache_salt=endpoint.prefix_cache_salt,
        tool_call_parser=endpoint.tool_call_parser,
        reasoning_parser=endpoint.reasoning_parser,
        whole_tool_calls=endpoint.whole_tool_calls,
        rate_limit=RateLimit(rate.requests, rate.seconds) if rate is not None else None,
        max_stored_bytes=endpoint.max_stored_bytes,
        stored_response_seconds=endpoint.stored_response_seconds,
        response_store=_path(endpoint.response_store),
        pod=identity.pod,
        group=identity.group,
        revision=config.revision,
        max_body_bytes=endpoint.max_body_bytes,
        read_seconds=endpoint.read_seconds,
        connection_seconds=endpoint.connection_seconds,
        accept_seconds=drain.accept_seconds,
        drain_seconds=drain.seconds,
    )


def _path(text: str | None) -> Path | None:
    return Path(text) if text is not None else None


def _tls(config: AgentConfig) -> Tls | None:
    endpoint = config.endpoint
    if endpoint.tls_cert_file is None or endpoint.tls_key_file is None:
        return None
    return Tls(endpoint.tls_cert_file, endpoint.tls_key_file)
