"""The admin endpoint: probes for the kubelet, the report for the operator and the group."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starling_engine import AsyncEngine

from starling_agent.file_token import FileToken
from starling_agent.group.leader import Leader, answer_group
from starling_agent.group.operations import Operations, answer_scale
from starling_agent.http.auth import bearer
from starling_agent.http.body_limit import BodyLimit
from starling_agent.http.errors import ApiError
from starling_agent.http.header_limit import HeaderLimit
from starling_agent.http.long_poll import number, poll_query
from starling_agent.node.drain_deadline import DrainDeadline
from starling_agent.node.pinned_commit import PinnedCommit
from starling_agent.node.standby import Standby
from starling_agent.openai.sleeping import put_to_sleep, sleep_answer, wake
from starling_agent.report_state import ReportState
from starling_agent.routers_only import RoutersOnly
from starling_agent.settings import MIB, READ_SECONDS


class SleepRoutes:
    """Sleep for the engine that serves now; the admin endpoint is there before it, and outlives it.

    `standby` has what the operator orders, which the engine follows by itself.
    """

    def __init__(self) -> None:
        self.engine: AsyncEngine | None = None
        self.standby = Standby()

    async def answer(self, request: Request) -> Response:
        """Answers one of the three routes. Raises ApiError."""
        if self.engine is None:
            raise ApiError(503, "no engine serves now", kind="server_error", code="engine_not_ready", headers={"Retry-After": "2"})
        match request.url.path.rpartition("/")[2]:
            case "sleep":
                return await put_to_sleep(self.engine, request)
            case "wake_up":
                return await wake(self.engine, request)
        return sleep_answer(self.engine)


def create_admin(
    state: ReportState,
    token: FileToken,
    leader: Leader | None,
    leader_address: str,
    operations: Operations | None,
    sleep_routes: SleepRoutes,
    pinned_commit: PinnedCommit,
    deadline: DrainDeadline,
    routers_only: RoutersOnly | None = None,
) -> Starlette:
    """Makes the application. Probes need no token: the kubelet has none. `leader` and `operations` are None on other nodes."""

    async def live(_: Request) -> Response:
        # The answer itself is the proof: the supervisor runs on the same loop, and the process ends when it does.
        return _probe_answer(True, "")

    async def ready(_: Request) -> Response:
        return _probe_answer(state.report.ready, _reason(state))

    async def health(_: Request) -> Response:
        return _probe_answer(state.report.healthy, _reason(state))

    async def report(request: Request) -> Response:
        _check_token(request, token)
        after, seconds = poll_query(request.query_params)
        pinned_commit.choose(request.query_params.get("commit", ""))
        if "ends_in" in request.query_params:
            deadline.set(number(request.query_params, "ends_in"))
        if routers_only is not None and (routed := request.query_params.get("routed")) in ("yes", "no"):
            routers_only.set(routed == "yes")
        if "sleep" in request.query_params:
            sleep_routes.standby.order(number(request.query_params, "sleep"))
        answer = await state.wait(after, request.query_params.get("incarnation"), seconds)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def group(request: Request) -> Response:
        _check_token(request, token)
        return await answer_group(request, leader, leader_address, *poll_query(request.query_params))

    async def scale(request: Request) -> Response:
        _check_token(request, token)
        return await answer_scale(request, operations, leader_address)

    async def sleep(request: Request) -> Response:
        _check_token(request, token)
        return await sleep_routes.answer(request)

    routes = [
        Route("/live", live),
        Route("/ready", ready),
        Route("/health", health),
        Route("/admin/report", report),
        Route("/admin/group", group, methods=["POST"]),
        Route("/admin/scale", scale, methods=["PUT", "GET", "DELETE"]),
        Route("/admin/sleep", sleep, methods=["POST"]),
        Route("/admin/wake_up", sleep, methods=["POST"]),
        Route("/admin/is_sleeping", sleep),
    ]
    limits = [Middleware(HeaderLimit), Middleware(BodyLimit, max_bytes=MIB, read_seconds=READ_SECONDS)]
    return Starlette(
        routes=routes, middleware=limits, exception_handlers={ApiError: _answer_api_error, HTTPException: _answer_http_exception}
    )


def _probe_answer(good: bool, reason: str) -> Response:
    return JSONResponse({"status": "ok"}) if good else JSONResponse({"status": "unavailable", "reason": reason}, 503)


def _reason(state: ReportState) -> str:
    report = state.report
    if report.asleep:
        return "asleep"
    return f"{report.phase}: {report.last_error}" if report.last_error else report.phase


def _check_token(request: Request, token: FileToken) -> None:
    """Raises ApiError 401. Called before anything else of the request is read."""
    given = bearer(request.scope)
    if given is None or not token.matches(given):
        message = "the admin token is missing or wrong; send it as 'Authorization: Bearer TOKEN'"
        raise ApiError(401, message, code="invalid_admin_token", headers={"WWW-Authenticate": "Bearer"})


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else None
    return await _answer_api_error(request, ApiError(error.status_code, str(error.detail), code=code, headers=error.headers))
