"""A tenant's quota: how many tokens a minute, and how many requests at once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from starling_agent.http.errors import ApiError
from starling_agent.http.token_bucket import TokenBucket

from starling_router.tenants import Tenant

MINUTE = 60.0
Cause = Literal["tokens", "concurrent"]


class QuotaExceeded(ApiError):
    """A request that is one too many, or has too many tokens."""

    def __init__(self, cause: Cause, message: str, seconds: float) -> None:
        headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
        super().__init__(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        self.cause = cause


class Quota:
    """Limits a tenant to what one of `routers` may give it: its part of the limits, for each router counts by itself.

    Output is not known before: it is taken as it comes, and a tenant may owe tokens then.
    """

    def __init__(self, tenant: Tenant, routers: int, clock: Callable[[], float]) -> None:
        self._tenant, self._clock = tenant, clock
        self.open = 0
        self._most = None if tenant.concurrent is None else max(1, tenant.concurrent // routers)
        tokens = tenant.tokens_per_minute
        self._bucket = None if tokens is None else TokenBucket.full(max(1.0, tokens / routers), MINUTE, clock())

    @contextmanager
    def request(self, tokens: int) -> Iterator[None]:
        """Admits a request with a prompt of so many tokens, and takes these. Raises QuotaExceeded."""
        self.check(tokens)
        self.take(tokens)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def check(self, tokens: int) -> None:
        """Raises QuotaExceeded for a request with a prompt of so many tokens, or of more, that may not come in now."""
        if self._most is not None and self.open >= self._most:
            raise QuotaExceeded("concurrent", f"{self._name} has {self.open} requests open, and may have {self._most}", 1.0)
        self._check_tokens(tokens)

    def take(self, tokens: float) -> None:
        """Takes tokens, or gives some back (below 0)."""
        if self._bucket is not None:
            self._bucket.refill(self._clock())
            self._bucket.level = min(self._bucket.capacity, self._bucket.level - tokens)

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's headers for what of the quota is left.

        There is no `x-ratelimit-reset-requests`: nobody knows before when the open requests will have ended.
        """
        headers = dict[str, str]()
        if self._most is not None:
            headers |= {"x-ratelimit-limit-requests": str(self._most)}
            headers |= {"x-ratelimit-remaining-requests": str(max(0, self._most - self.open))}
        if (bucket := self._bucket) is not None:
            bucket.refill(self._clock())
            headers |= {"x-ratelimit-limit-tokens": str(int(bucket.capacity))}
            headers |= {"x-ratelimit-remaining-tokens": str(max(0, int(bucket.level)))}
            headers |= {"x-ratelimit-reset-tokens": duration(bucket.seconds_until(bucket.capacity))}
        return headers

    def _check_tokens(self, tokens: int) -> None:
        if (bucket := self._bucket) is None:
            return
        bucket.refill(self._clock())
        limit = int(bucket.capacity)
        if tokens > limit:
            raise QuotaExceeded(
                "tokens", f"the prompt has some {tokens} tokens, and {self._name} may have {limit} a minute", MINUTE
            )
        if bucket.level < tokens:
            wait = bucket.seconds_until(tokens)
            left = max(0, int(bucket.level))
            why = f"{self._name} may have {limit} tokens a minute, has {left} left, and asks for {tokens} or more"
            raise QuotaExceeded("tokens", f"{why}; try again in {wait:.1f} s", wait)

    @property
    def _name(self) -> str:
        return f"tenant {self._tenant.name}"


def duration(seconds: float) -> str:
    """Writes a time as OpenAI does: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{int(rest)}s" if minutes else f"{rest:.3g}s"
