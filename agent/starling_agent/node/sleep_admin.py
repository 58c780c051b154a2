"""Sleep on the admin endpoint: `/admin/sleep`, `/admin/wake_up` and `/admin/is_sleeping`, as `openai.sleeping` has them."""

from starlette.requests import Request
from starlette.responses import Response
from starling_engine import AsyncEngine

from starling_agent.http.errors import ApiError
from starling_agent.openai.sleeping import put_to_sleep, sleep_answer, wake


class SleepAdmin:
    """Sleep for the engine that serves now; the admin endpoint is there before it, and outlives it."""

    def __init__(self) -> None:
        self.engine: AsyncEngine | None = None

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
