"""Answers an error from a layer that stands before the application's own error handling."""

from starlette.types import Receive, Send

from starling_agent.openai.errors import ApiError


async def send_error(send: Send, error: ApiError, *, close: bool = False) -> None:
    await start_error(send, error, close=close)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def start_error(send: Send, error: ApiError, *, close: bool = False) -> None:
    """Sends the whole error but leaves the response open."""
    body = error.body()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    if close:
        headers["Connection"] = "close"
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def discard_body(receive: Receive) -> None:
    """Reads until the body ends or the client goes."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
