"""POST /sleep and /wake_up, GET /is_sleeping: the engine's memory for others meanwhile. Queries and answers are vLLM's."""

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starling_engine import AsyncEngine
from starling_engine.errors import StarlingError

from starling_agent.http.errors import as_api_error, invalid
from starling_agent.http.foreign import check_origin
from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import endpoint_of

router = APIRouter(tags=["sleep"])


async def own_page(request: Request) -> None:
    """Raises ApiError 403."""
    check_origin(request.headers, endpoint_of(request).settings.allowed_origins)


class SleepAnswer(msgspec.Struct):
    is_sleeping: bool


@router.post("/sleep", dependencies=[Depends(own_page)])
async def sleep(request: Request) -> Response:
    """?level=1|2, and &mode=wait|abort where requests run. Answers when the memory is free; 409 where it cannot be."""
    return await put_to_sleep(endpoint_of(request).engine, request)


@router.post("/wake_up", dependencies=[Depends(own_page)])
async def wake_up(request: Request) -> Response:
    """?tags=weights&tags=kv_cache, or all. Answers when that is there again."""
    return await wake(endpoint_of(request).engine, request)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Whether the engine has given memory back."""
    return state_of(endpoint_of(request).engine)


async def put_to_sleep(engine: AsyncEngine, request: Request) -> Response:
    """Raises ApiError."""
    query = request.query_params
    level = query.get("level", "1")
    if not level.isdecimal() or len(level) > 3:
        raise invalid(f"must be 1 or 2, got {level[:100]!r}", "level")
    try:
        await engine.sleep(int(level), query.get("mode"))
    except StarlingError as error:
        raise as_api_error(error) from None
    return state_of(engine)


async def wake(engine: AsyncEngine, request: Request) -> Response:
    """Raises ApiError."""
    try:
        await engine.wake_up(request.query_params.getlist("tags"))
    except StarlingError as error:
        raise as_api_error(error) from None
    return state_of(engine)


def state_of(engine: AsyncEngine) -> Response:
    return json_response(SleepAnswer(engine.is_sleeping))
