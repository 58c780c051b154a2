"""Answers an error from a layer that stands before the application's own error handling."""

from starlette.types import Send

from starling_agent.http.errors import ApiError


async def send_error(send: Send, error: ApiError) -> None:
    body = error.body()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
