"""`/admin/scale`: see `contract.scale`."""

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from starling_agent.contract.scale import Operation, ScaleRequest
from starling_agent.group.scaler import Scaler, ScaleRefusal
from starling_agent.http.errors import ApiError

STATUS = {"invalid_target": 400, "unknown_operation": 404}
"""Of refusals; 409 for the others."""


async def answer_scale(request: Request, scaler: Scaler | None, leader_at: str) -> Response:
    """`scaler` is the leader's; None on other nodes. Raises ApiError for what is refused."""
    if scaler is None:
        raise ApiError(409, f"this node does not lead its group; ask {leader_at}", code="not_leader")
    try:
        operation = await _asked(request, scaler)
    except ScaleRefusal as refused:
        raise ApiError(STATUS.get(refused.code, 409), str(refused), code=refused.code, param=_param(refused)) from None
    status = 200 if request.method in ("GET", "HEAD") else 202
    return Response(operation.model_dump_json(), status, media_type="application/json")


async def _asked(request: Request, scaler: Scaler) -> Operation:
    if request.method == "PUT":
        return scaler.put(await _scale_request(request))
    name = request.query_params.get("operation")
    if not name:
        raise ApiError(400, "operation: give the id of one, as ?operation=ID", param="operation", code="invalid_value")
    return scaler.cancel(name) if request.method == "DELETE" else scaler.get(name)


async def _scale_request(request: Request) -> ScaleRequest:
    try:
        return ScaleRequest.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else None
        code = "invalid_target" if field == "data" else "invalid_value"
        raise ApiError(400, f"{field or 'body'}: {first['msg']}", param=field, code=code) from None


def _param(refused: ScaleRefusal) -> str | None:
    return {"invalid_target": "data", "unknown_operation": "operation"}.get(refused.code)
