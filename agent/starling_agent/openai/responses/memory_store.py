"""Responses in the memory of this process."""

import time
from collections import Counter, OrderedDict, defaultdict
from itertools import chain

from starling_agent.openai.responses.store import ResponseStore, StoredResponse, StoreLimits


class MemoryStore(ResponseStore):
    """The responses that were used last. Where there is no more room, the owner with the most bytes gives way."""

    def __init__(self, limits: StoreLimits, pod: str = "") -> None:
        super().__init__(limits, pod)
        self._responses: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        """Responses with the times at which they were stored."""
        self._ids: dict[str | None, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """The same by their owners."""
        self._bytes: Counter[str | None] = Counter()
        self.bytes = 0

    async def put(self, response_id: str, stored: StoredResponse) -> None:
        await self._forget(response_id)
        self._responses[response_id] = time.monotonic(), stored
        self._ids[stored.owner][response_id] = None
        self._bytes[stored.owner] += stored.size
        self.bytes += stored.size
        while self.bytes > self._limits.max_bytes:
            await self._forget(self._least_missed(response_id))

    def _least_missed(self, new: str) -> str:
        """Returns the response that gives way: one that has ended and is not new, of the owner with the most bytes if possible."""
        (owner, _), *_ = self._bytes.most_common(1)
        for response_id in chain(self._ids[owner], self._responses):
            if response_id != new and not self._responses[response_id][1].is_running:
                return response_id
        return next(iter(self._responses))

    async def update(self, response_id: str, stored: StoredResponse) -> None:
        if response_id in self._responses:
            await self.put(response_id, stored)

    async def keep(self, response_id: str) -> bool:
        if response_id not in self._responses:
            return True
        self._touch(response_id)
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
        self._touch(response_id)
        return stored

    def _touch(self, response_id: str) -> None:
        self._responses.move_to_end(response_id)
        self._ids[self._responses[response_id][1].owner].move_to_end(response_id)

    async def _forget(self, response_id: str) -> None:
        if (found := self._responses.pop(response_id, None)) is None:
            return
        owner, size = found[1].owner, found[1].size
        self.bytes -= size
        self._bytes[owner] -= size
        del self._ids[owner][response_id]
        if not self._ids[owner]:
            del self._ids[owner], self._bytes[owner]
