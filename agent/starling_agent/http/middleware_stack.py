"""The middleware of every HTTP server here: ids, limits, keys."""

from collections import Counter

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from starling_agent.drain import Drain
from starling_agent.http.allowed_hosts import AllowedHosts
from starling_agent.http.auth import KeyCheck
from starling_agent.http.body_limit import BodyLimit
from starling_agent.http.header_limit import HeaderLimit
from starling_agent.http.normalization import HeadAsGet, SlashNormalizer
from starling_agent.http.outermost import OutermostMiddleware
from starling_agent.http.rate_limit import RateLimiter
from starling_agent.http.router_check import RouterCheck
from starling_agent.settings import ServerSettings


def middleware_stack(settings: ServerSettings, drain: Drain, responses: "Counter[tuple[str, int]]") -> list[Middleware]:
    """Returns the middleware, outermost first. All is plain ASGI: BaseHTTPMiddleware would copy each chunk through a queue."""
    stack = [
        Middleware(SlashNormalizer),
        Middleware(OutermostMiddleware, drain=drain, responses=responses, access_log=settings.access_log),
        Middleware(HeaderLimit),
    ]
    if settings.allowed_hosts:
        stack.append(Middleware(AllowedHosts, allowed=settings.allowed_hosts))
    if settings.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if settings.routers_only is not None:
        stack.append(Middleware(RouterCheck, rule=settings.routers_only))
    if settings.api_keys or settings.router_token is not None:
        salted = settings.prefix_cache_salt == "key"
        stack.append(Middleware(KeyCheck, keys=settings.api_keys, salted=salted, router_token=settings.router_token))
    if settings.rate_limit is not None:
        stack.append(Middleware(RateLimiter, limit=settings.rate_limit))
    stack.append(Middleware(BodyLimit, max_bytes=settings.max_body_bytes, read_seconds=settings.read_seconds))
    stack.append(Middleware(HeadAsGet))
    return stack


def with_middleware(app: ASGIApp, settings: ServerSettings, drain: Drain, responses: "Counter[tuple[str, int]]") -> ASGIApp:
    """Returns an application that is none of FastAPI's within the same middleware."""
    for layer in reversed(middleware_stack(settings, drain, responses)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app
