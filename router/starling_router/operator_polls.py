"""`POST /router/report`, by which the operator learns what clients ask for, and the router what the operator knows."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starling_agent.client.bounded import BadAnswer, parse
from starling_agent.contract.router_report import ServiceNotice
from starling_agent.file_token import FileToken
from starling_agent.http.auth import shows_router_token
from starling_agent.http.errors import ApiError, invalid
from starling_agent.http.long_poll import poll_query

from starling_router.canary import CanaryTraffic
from starling_router.demand import Demand
from starling_router.service_state import ServiceState

PATH = "/router/report"


class OperatorPolls:
    """Answers whoever shows the routers' token; `contract.router_report` has the form."""

    def __init__(self, demand: Demand, state: ServiceState, canary: CanaryTraffic, token: FileToken | None) -> None:
        self._demand, self._state, self._canary, self._token = demand, state, canary, token

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        request = Request(scope, receive)
        if not shows_router_token(scope, self._token):
            raise ApiError(403, "only the operator of this service may ask for this, with the routers' token", code="operator_only")
        after, seconds = poll_query(request.query_params)
        try:
            notice = parse(ServiceNotice, await request.body(), "notice")
        except BadAnswer as error:
            raise invalid(str(error)) from None
        self._state.take(notice)
        self._canary.take(notice.canary)
        report = await self._demand.wait(after, request.query_params.get("incarnation", ""), seconds)
        await Response(report.model_dump_json(), media_type="application/json")(scope, receive, send)
