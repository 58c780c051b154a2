"""POST /sleep and /wake_up, GET /is_sleeping. Queries and answers are vLLM's."""

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starling_engine import AsyncEngine
from starling_engine.errors import StarlingError

from starling_agent.http.allowed_origins import check_origin
from starling_agent.http.errors import as_api_error, invalid
from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import endpoint_of

router = APIRouter(tags=["sleep"])


async def require_same_origin(request: Request) -> None:
    """Raises ApiError 403 for a request of a page from another origin."""
    check_origin(request.headers, endpoint_of(request).settings.allowed_origins)


class SleepAnswer(msgspec.Struct):
    is_sleeping: bool


@router.post("/sleep", dependencies=[Depends(require_same_origin)])
async def sleep(request: Request) -> Response:
    """Takes ?level=1|2, and &mode=wait|abort if requests run. Answers when the memory is free, or 409."""
    return await put_to_sleep(endpoint_of(request).engine, request)


@router.post("/wake_up", dependencies=[Depends(require_same_origin)])
async def wake_up(request: Request) -> Response:
    """Takes ?tags=weights&tags=kv_cache; none means all. Answers when their memory is back."""
    return await wake(endpoint_of(request).engine, request)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Tells if the engine sleeps."""
    return sleep_answer(endpoint_of(request).engine)


async def put_to_sleep(engine: AsyncEngine, request: Request) -> Response:
    """Reads the request's query and has the engine sleep. Raises ApiError."""
    query = request.query_params
    level = query.get("level", "1")
    if not level.isdecimal() or len(level) > 3:
        raise invalid(f"must be 1 or 2, got {level[:100]!r}", "level")
    try:
        await engine.sleep(int(level), query.get("mode"))
    except StarlingError as error:
        raise as_api_error(error) from None
    return sleep_answer(engine)


async def wake(engine: AsyncEngine, request: Request) -> Response:
    """Reads the request's query and wakes the engine. Raises ApiError."""
    try:
        await engine.wake_up(request.query_params.getlist("tags"))
    except StarlingError as error:
        raise as_api_error(error) from None
    return sleep_answer(engine)


def sleep_answer(engine: AsyncEngine) -> Response:
    return json_response(SleepAnswer(engine.is_sleeping))
