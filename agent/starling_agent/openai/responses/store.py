"""Stored responses: what is kept of one, and the contract of what keeps them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog

from starling_agent.http.errors import ApiError
from starling_agent.openai.responses.ids import not_found

RUNNING = ("queued", "in_progress")
CONTINUABLE = ("completed", "incomplete")
"""Statuses of a response that another one can go on from."""
log = structlog.get_logger("starling.responses")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its conversation.

    owner       stands for the API key that made it; None: the endpoint is open
    status      that of `response`
    response    the response's JSON
    items       the JSON of all items of the conversation, those of the response included; empty where it cannot be continued
    own_items   the JSON of the items that its request brought
    background  it was made in the background
    events      the events of one that was made in the background as a stream; None: they are not kept
    """

    owner: str | None
    status: str
    response: bytes
    items: bytes = b""
    own_items: bytes = b"[]"
    background: bool = False
    events: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items) + len(self.own_items) + len(self.events or b"")

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """A store holds so many bytes at most, and each response for so many seconds."""

    max_bytes: int
    max_seconds: float


class ResponseStore(ABC):
    """Keeps responses within its limits; the oldest, or those that were not used for longest, make room for later ones.

    A response is its owner's: for others `get` and `delete` raise ApiError 404, as they do for one that is not there. A running
    one is kept alive by `keep`. Methods may wait for a disk, never for long, and never block the event loop.
    """

    is_shared = False
    """Other pods read the store, and it outlives the process."""

    def __init__(self, limits: StoreLimits, pod: str) -> None:
        """`pod` is this pod's name, as ids have it."""
        self._limits = limits
        self._pod = pod

    def takes(self, size: int) -> bool:
        """Says if a conversation of so many bytes is stored: one alone may have a quarter of the room."""
        return size * 4 <= self._limits.max_bytes

    @abstractmethod
    async def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response. Raises OSError where that cannot be done."""

    @abstractmethod
    async def update(self, response_id: str, stored: StoredResponse) -> None:
        """Replaces a response; one that was deleted meanwhile stays so. Raises OSError."""

    async def try_to_put(self, response_id: str, stored: StoredResponse) -> bool:
        """Keeps a response; returns False, with a line in the log, where that cannot be done."""
        try:
            await self.put(response_id, stored)
        except OSError as error:
            log.error("a response cannot be stored", id=response_id, cause=str(error))
            return False
        return True

    async def get(self, response_id: str, owner: str | None) -> StoredResponse:
        """Returns a response. Raises ApiError 404 for one that is not there, or that another key made, and OSError."""
        stored = await self._find(response_id)
        if stored is None or stored.owner != owner:
            raise not_found(response_id, self._pod, is_shared=self.is_shared)
        return stored

    async def delete(self, response_id: str, owner: str | None) -> None:
        """Forgets a response. Raises as `get` does."""
        await self.get(response_id, owner)
        await self._forget(response_id)

    @abstractmethod
    async def keep(self, response_id: str) -> bool:
        """Says that a running response still runs. Returns True when it should not: it was deleted, or is to be cancelled."""

    @abstractmethod
    async def ask_to_cancel(self, response_id: str) -> None:
        """Asks the pod that makes a response to cancel it. Raises OSError."""

    @abstractmethod
    async def _find(self, response_id: str) -> StoredResponse | None: ...

    @abstractmethod
    async def _forget(self, response_id: str) -> None: ...


@contextmanager
def store_failures() -> Iterator[None]:
    """Makes 503 of an OSError, with a line in the log."""
    try:
        yield
    except OSError as error:
        log.error("the store of responses failed", cause=str(error))
        message = f"the store of responses cannot be used now: {error.strerror or error}"
        raise ApiError(503, message, kind="server_error", code="store_failed") from None


def lost(stored: StoredResponse) -> StoredResponse:
    """Returns a running response as failed: the process that made it is gone."""
    response: dict[str, Any] = msgspec.json.decode(stored.response)
    error = {"code": "server_error", "message": "the pod that made the response ended before it was complete"}
    return replace(stored, status="failed", response=msgspec.json.encode({**response, "status": "failed", "error": error}))
