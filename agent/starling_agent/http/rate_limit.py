"""A rate limit: a token bucket for each client."""

import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.http.auth import OPEN_PATHS, STATE_PATHS, is_of_router
from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError
from starling_agent.http.token_bucket import TokenBucket
from starling_agent.settings import RateLimit

MAX_BUCKETS = 10_000


class Buckets:
    """Buckets by client, without HTTP. Each holds `limit.requests` tokens and is refilled evenly over `limit.seconds`."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = float(limit.requests)
        self._seconds = limit.seconds
        self._clock = clock
        self._buckets: dict[bytes, TokenBucket] = {}

    def take(self, client: bytes) -> float:
        """Takes a token and returns 0, or returns the seconds until there is one."""
        now = self._clock()
        bucket = self._buckets.get(client)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[client] = TokenBucket.full(self._capacity, self._seconds, now)
        bucket.refill(now)
        if bucket.level < 1.0:
            return bucket.seconds_until(1.0)
        bucket.level -= 1.0
        return 0.0

    def _make_room(self, now: float) -> None:
        """Drops full buckets, which are like new ones, so that unknown clients cannot fill the memory."""
        if len(self._buckets) < MAX_BUCKETS:
            return
        self._buckets = {client: b for client, b in self._buckets.items() if now - b.filled < self._seconds}
        if len(self._buckets) >= MAX_BUCKETS:
            del self._buckets[min(self._buckets, key=lambda client: self._buckets[client].filled)]


class RateLimiter:
    """Answers 429 with Retry-After above the limit. A client is its API key, or its address where there are no keys."""

    def __init__(self, app: ASGIApp, *, limit: RateLimit) -> None:
        self._app = app
        self._limit = limit
        self._buckets = Buckets(limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or _is_routers_own(scope):
            await self._app(scope, receive, send)
            return
        wait = self._buckets.take(_client(scope))
        if wait > 0:
            await send_error(scope, send, self._too_many(wait))
        else:
            await self._app(scope, receive, send)

    def _too_many(self, wait: float) -> ApiError:
        limit = self._limit
        return ApiError(
            429,
            f"more than {limit.requests} requests in {limit.seconds:g} s; try again in {wait:.1f} s",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, math.ceil(wait)))},
        )


def _client(scope: Scope) -> bytes:
    client = scope.get("client")
    # An unchecked key must not give a client a new bucket: where keys are not checked, only the address counts.
    owner = scope.get("state", {}).get("key_owner")
    if not owner and is_of_router(scope):  # whose address is that of all its clients; it puts theirs behind what they say
        forwarded: list[bytes] = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        if forwarded:
            return forwarded[-1].rpartition(b",")[2].strip()
    return str(owner).encode() if owner else (str(client[0]).encode() if client else b"")


def _is_routers_own(scope: Scope) -> bool:
    """Says whether a router asks for itself, and no client through it."""
    state = scope.get("state", {})
    return bool(state.get("is_shadow")) or (scope["path"] in STATE_PATHS and is_of_router(scope))
