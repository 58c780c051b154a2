"""Responses in the memory of this process."""

import time
from collections import OrderedDict

from starling_agent.openai.responses.store import ResponseStore, StoredResponse, StoreLimits


class MemoryStore(ResponseStore):
    """The responses that were used last."""

    def __init__(self, limits: StoreLimits, pod: str = "") -> None:
        super().__init__(limits, pod)
        self._responses: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        """Responses with the times at which they were stored."""
        self.bytes = 0

    async def put(self, response_id: str, stored: StoredResponse) -> None:
        await self._forget(response_id)
        self._responses[response_id] = time.monotonic(), stored
        self.bytes += stored.size
        while self.bytes > self._limits.max_bytes:
            await self._forget(next(iter(self._responses)))

    async def update(self, response_id: str, stored: StoredResponse) -> None:
        if response_id in self._responses:
            await self.put(response_id, stored)

    async def keep(self, response_id: str) -> bool:
        if response_id not in self._responses:
            return True
        self._responses.move_to_end(response_id)
        return False

    async def ask_to_cancel(self, response_id: str) -> None:
        """Does nothing: no other pod has responses here."""

    async def _find(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._responses:
            return None
        stored_at, stored = self._responses[response_id]
        if not stored.is_running and time.monotonic() - stored_at > self._limits.max_seconds:
            await self._forget(response_id)
            return None
        return stored

    async def get(self, response_id: str, owner: str | None) -> StoredResponse:
        stored = await super().get(response_id, owner)
        self._responses.move_to_end(response_id)
        return stored

    async def _forget(self, response_id: str) -> None:
        if (found := self._responses.pop(response_id, None)) is not None:
            self.bytes -= found[1].size
