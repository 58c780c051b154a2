"""The leader's routes on its admin endpoint: `/admin/group` and `/admin/scale`, as `contract` describes them."""

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from starling_agent.contract.group import GroupMember
from starling_agent.contract.scale import Operation, ScaleRequest
from starling_agent.group.leader import GroupRefusal, Leader
from starling_agent.group.operations import Operations, ScaleRefusal
from starling_agent.http.errors import ApiError

SCALE_STATUS = {"invalid_target": 400, "unknown_operation": 404}
"""HTTP status by code of a ScaleRefusal; other codes have 409."""


async def answer_group(request: Request, leader: Leader | None, leader_address: str, after: int, seconds: float) -> Response:
    """Answers a node's poll. `leader` is None on other nodes. Raises ApiError."""
    if leader is None:
        raise _not_leader(leader_address)
    try:
        member = GroupMember.model_validate_json(await request.body())
    except ValidationError as error:
        raise ApiError(400, f"no node describes itself so: {error}", code="invalid_value") from None
    if request.query_params.get("leader") != leader.view.incarnation:
        after = 0
    try:
        view = await leader.answer(member, after, seconds)
    except GroupRefusal as refused:
        raise ApiError(400 if refused.code == "no_such_node" else 409, str(refused), code=refused.code) from None
    return Response(view.model_dump_json(), media_type="application/json")


async def answer_scale(request: Request, operations: Operations | None, leader_address: str) -> Response:
    """Begins, reads or cancels an operation. `operations` is None on other nodes than the leader. Raises ApiError."""
    if operations is None:
        raise _not_leader(leader_address)
    try:
        operation = await _operation(request, operations)
    except ScaleRefusal as refused:
        raise ApiError(SCALE_STATUS.get(refused.code, 409), str(refused), code=refused.code, param=_param(refused)) from None
    status = 200 if request.method in ("GET", "HEAD") else 202
    return Response(operation.model_dump_json(), status, media_type="application/json")


async def _operation(request: Request, operations: Operations) -> Operation:
    if request.method == "PUT":
        return operations.put(await _scale_request(request))
    name = request.query_params.get("operation")
    if not name:
        raise ApiError(400, "operation: give the id of one, as ?operation=ID", param="operation", code="invalid_value")
    return operations.cancel(name) if request.method == "DELETE" else operations.get(name)


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


def _not_leader(leader_address: str) -> ApiError:
    return ApiError(409, f"this node does not lead its group; ask {leader_address}", code="not_leader")
