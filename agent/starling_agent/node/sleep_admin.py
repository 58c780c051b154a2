"""Sleep on the admin endpoint: `/admin/sleep`, `/admin/wake_up` and `/admin/is_sleeping`, as `openai.sleeping` has them."""

from starlette.requests import Request
from starlette.responses import Response
from starling_engine import AsyncEngine

from starling_agent.http.errors import ApiError
from starling_agent.openai.sleeping import put_to_sleep, state_of, wake


class SleepAdmin:
    """The admin endpoint is there before the engine, and outlives it. `engine` is the one that serves now."""

    def __init__(self) -> None:
        self.engine: AsyncEngine | None = None

    async def answer(self, request: Request) -> Response:
        """Raises ApiError."""
        if self.engine is None:
            raise ApiError(503, "no engine serves now", kind="server_error", code="engine_not_ready", headers={"Retry-After": "2"})
        match request.url.path.rpartition("/")[2]:
            case "sleep":
                return await put_to_sleep(self.engine, request)
            case "wake_up":
                return await wake(self.engine, request)
        return state_of(self.engine)
