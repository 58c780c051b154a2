"""The leader's desk on its admin endpoint."""

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from starling_agent.contract.group import GroupMember
from starling_agent.group.leader import Leader
from starling_agent.group.membership_service import GroupRefusal
from starling_agent.http.errors import ApiError


async def answer_member(request: Request, leader: Leader | None, leader_at: str, after: int, seconds: float) -> Response:
    """Raises ApiError for what the contract says is refused."""
    if leader is None:
        raise ApiError(409, f"this node does not lead its group; ask {leader_at}", code="not_leader")
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
