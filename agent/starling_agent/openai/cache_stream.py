"""Tells routers what is cached here: a line of JSON for each `CoreChanges`, all that is there at first, and then what changes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from starling_agent.http.open_requests import OpenRequests
from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.event_stream import EventStream

_encode = msgspec.json.Encoder().encode


class CacheStream(EventStream):
    """Ends as soon as the server drains: no request is open with it, and none waits for it."""

    media_type = "application/jsonl"

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(b"", _lines(endpoint), OpenRequests(), error_event=lambda _: b"")


async def _lines(endpoint: Endpoint) -> AsyncGenerator[bytes]:
    async with aclosing(endpoint.engine.follow_caches()) as caches:
        async for some in caches:
            if endpoint.drain.draining:
                return
            for changes in some:
                yield _encode(changes) + b"\n"
