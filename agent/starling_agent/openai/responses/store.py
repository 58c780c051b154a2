"""Responses that can be fetched, continued and deleted, in memory and within a number of bytes."""

from collections import OrderedDict
from dataclasses import dataclass

from starling_agent.http.errors import ApiError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its conversation.

    owner     stands for the API key that made it; None: the endpoint is open
    response  the response's JSON
    items     the JSON of all items of the conversation, those of the response included
    own_items the JSON of the items that its request brought
    """

    owner: str | None
    response: bytes
    items: bytes
    own_items: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items) + len(self.own_items)


class ResponseStore:
    """The responses that were used last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def takes(self, size: int) -> bool:
        """Says if a conversation of so many bytes is stored: one alone may have a quarter of the room."""
        return size * 4 <= self._max_bytes

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response, in the place of those that were not used for longest."""
        self._forget(response_id)
        self._responses[response_id] = stored
        self.bytes += stored.size
        while self.bytes > self._max_bytes:
            self._forget(next(iter(self._responses)))

    def get(self, response_id: str, owner: str | None) -> StoredResponse:
        """Returns a response. Raises ApiError 404 for one that is not there, or that another key made."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            message = f"there is no response {response_id[:200]!r}; it was deleted, not stored, or made room for later ones"
            raise ApiError(404, message, code="response_not_found")
        self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str | None) -> None:
        """Forgets a response. Raises as `get` does."""
        self.get(response_id, owner)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        if (stored := self._responses.pop(response_id, None)) is not None:
            self.bytes -= stored.size
