"""The rule that requests have to come through routers. The operator sets it with its polls: no agent is restarted for it."""

import math
import time

from starling_agent.contract.router import seconds_to_leave
from starling_agent.file_token import FileToken


class RoutersOnly:
    """Admits all until it is told otherwise; with `closed` routers alone, for ever: the agent knows no keys.

    Connections that were let in before have `connection_seconds` to end by themselves.
    """

    def __init__(self, token: FileToken, connection_seconds: float, *, closed: bool) -> None:
        self._token = token
        self._grace = seconds_to_leave(connection_seconds)
        self._was_open = False
        self._stays_closed, self._closed_at = closed, -math.inf if closed else math.inf

    def set(self, required: bool) -> None:
        """Sets whether clients are led to routers. An agent that is told so first of all was never reached in another way."""
        if self._stays_closed:
            return
        if not required:
            self._was_open, self._closed_at = True, math.inf
        elif self._closed_at == math.inf:
            self._closed_at = time.monotonic() + (self._grace if self._was_open else 0.0)

    def admits(self, token: bytes) -> bool:
        return time.monotonic() < self._closed_at or self._token.matches(token)
