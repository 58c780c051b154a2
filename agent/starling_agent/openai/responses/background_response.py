"""One response that is made in the background, and who follows it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from starling_engine.errors import InvalidRequest

from starling_agent.openai.responses.store import StoredResponse

if TYPE_CHECKING:
    from starling_agent.openai.responses.run import ResponseRun


class BackgroundResponse:
    """A response that is being made, with its events so far if it was asked for as a stream."""

    def __init__(self, run: "ResponseRun", takes: Callable[[int], bool], *, has_events: bool) -> None:
        """`takes` says if events of so many bytes are stored."""
        self.id: str = run.writer.response["id"]
        self.run = run
        self.taken = asyncio.Event()
        """Set once the engine has taken it: from then on a failure is the response's, and before it is the request's."""
        self.refusal: Exception | None = None
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()
        self._takes = takes
        self._events: list[bytes] | None = [] if has_events else None
        self._bytes = self._followers = 0
        self._grew = asyncio.Event()

    def add(self, events: bytes) -> None:
        """Adds events. Readers get them at once. Too many to be stored are not kept, once nobody follows."""
        if self._events is not None:
            self._events += split_events(events)
            self._bytes += len(events)
            if not self._followers and not self._takes(self._bytes):
                self._events = None
        grew, self._grew = self._grew, asyncio.Event()
        grew.set()

    def stored(self) -> StoredResponse:
        """Returns what is stored of it: its events, too, when it has ended."""
        has_all = self.ended.is_set() and self._events is not None
        return self.run.stored(b"".join(self._events or ()) if has_all else None)

    def events(self, after: int) -> AsyncGenerator[bytes]:
        """Returns the events behind the one of this number, up to the last one. Raises InvalidRequest where none are kept."""
        if self._events is None:
            raise without_events()
        self._followers += 1
        return self._follow(self._events, after + 1)

    async def _follow(self, events: list[bytes], at: int) -> AsyncGenerator[bytes]:
        try:
            while at < len(events) or not self.ended.is_set():
                grew = self._grew
                if at < len(events):
                    new = b"".join(events[at:])
                    at = len(events)
                    yield new
                else:
                    await grew.wait()
        finally:
            self._followers -= 1


def split_events(text: bytes) -> list[bytes]:
    """Returns the server-sent events in a text, which has nothing but whole ones."""
    return [event + b"\n\n" for event in text.split(b"\n\n")[:-1]]


def without_events() -> InvalidRequest:
    return InvalidRequest("its events are not stored: that takes background: true, stream: true, and room in the store", "stream")
