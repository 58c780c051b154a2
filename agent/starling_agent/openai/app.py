"""The FastAPI application: its routes, errors and middleware."""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starling_engine.errors import EngineAsleep, StarlingError

from starling_agent.drain import Drain
from starling_agent.http.allowed_hosts import AllowedHosts
from starling_agent.http.auth import KeyCheck
from starling_agent.http.body_limit import BodyLimit
from starling_agent.http.errors import ApiError, as_api_error
from starling_agent.http.header_limit import HeaderLimit
from starling_agent.http.normalization import HeadAsGet, SlashNormalizer
from starling_agent.http.open_requests import ClientGone
from starling_agent.http.outermost import OutermostMiddleware
from starling_agent.http.rate_limit import RateLimiter
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.openai import chat, completions, embeddings, models, probes, sleeping, tokens
from starling_agent.openai.anthropic import routes as anthropic_routes
from starling_agent.openai.anthropic.errors import anthropic_error
from starling_agent.openai.anthropic.protocol import CountRequest, MessagesRequest
from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.protocol.base import RequestModel, field_path
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.protocol.completion import CompletionRequest
from starling_agent.openai.protocol.embedding import EmbeddingRequest
from starling_agent.openai.protocol.tokens import DetokenizeRequest, TokenizeRequest
from starling_agent.openai.responses import routes as responses_routes
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.settings import ServerSettings
from starling_agent.version import starling_version

BODIES: Sequence[type[RequestModel]] = (
    ChatRequest,
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
CLIENT_CLOSED_REQUEST = 499


def error_responses(errors: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Describes statuses for the page at /docs."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in errors.items()}


ERRORS = error_responses(
    {
        400: "The request is wrong: `param` names the field.",
        401: "The API key is missing or not known here.",
        404: "The model or the path does not exist.",
        405: "The path has other methods.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        415: "The content type is not application/json.",
        421: "The server does not answer for this host.",
        429: "Too much at once: try again after `Retry-After` seconds.",
        431: "The header is too large.",
        500: "The engine could not finish the request.",
        503: "The server starts, sleeps or ends, or its engine died.",
    }
)
SLEEP_ERRORS = error_responses({403: "A page of another origin asks.", 409: "Requests run: `mode` says what becomes of them."})
ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
log = structlog.get_logger("starling.http")


def create_app(endpoint: Endpoint) -> FastAPI:
    app = FastAPI(
        title="Starling",
        version=starling_version(),
        description="Serves one large language model over OpenAI's API.",
        middleware=middleware_stack(endpoint.settings, endpoint.drain, endpoint.metrics),
        redirect_slashes=False,
    )
    app.state.endpoint = endpoint
    for module in (chat, responses_routes, anthropic_routes, completions, embeddings, models, tokens, probes):
        app.include_router(module.router, responses=ERRORS)
    if endpoint.engine.config.sleep_mode:
        app.include_router(sleeping.router, responses=ERRORS | SLEEP_ERRORS)
    for kind in (ApiError, StarlingError, HTTPException, RequestValidationError, ClientGone, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def middleware_stack(settings: ServerSettings, drain: Drain, metrics: RequestMetrics) -> list[Middleware]:
    """Returns the middleware, outermost first. All is plain ASGI: BaseHTTPMiddleware would copy each chunk through a queue."""
    stack = [
        Middleware(SlashNormalizer),
        Middleware(OutermostMiddleware, drain=drain, responses=metrics.responses, access_log=settings.access_log),
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
    if settings.api_keys:
        stack.append(Middleware(KeyCheck, keys=settings.api_keys, salted=settings.prefix_cache_salt == "key"))
    if settings.rate_limit is not None:
        stack.append(Middleware(RateLimiter, limit=settings.rate_limit))
    stack.append(Middleware(BodyLimit, max_bytes=settings.max_body_bytes, read_seconds=settings.read_seconds))
    stack.append(Middleware(HeadAsGet))
    return stack


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone | ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(error, EngineAsleep):
        log.info("refused", request_id=request.scope["state"]["request_id"], reason=str(error))
    api_error = _as_api_error(request, error)
    if f"{request.url.path}/".startswith(f"{anthropic_routes.PATH}/"):
        body = anthropic_error(api_error, request.scope["state"]["request_id"])
        return Response(body, api_error.status, headers=api_error.headers, media_type="application/json")
    return Response(api_error.body(), api_error.status, headers=api_error.headers, media_type="application/json")


def _as_api_error(request: Request, error: Exception) -> ApiError:
    """Makes an ApiError of FastAPI's own errors, and of all others."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return ApiError(400, first["msg"], param=field_path(first["loc"][1:]), code="invalid_value")
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return ApiError(404, f"there is no {request.url.path[:200]}", code="not_found")
        if error.status_code == 405:
            message = f"{request.method} is not possible on {request.url.path[:200]}"
            return ApiError(405, message, code="method_not_allowed", headers=error.headers)
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return as_api_error(error)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Makes the schema of /docs. Routes read their bodies without FastAPI, so the bodies' schemas are added here."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in BODIES], ref_template="#/components/schemas/{model}"
        )
        schema["components"] = {"schemas": {**definitions["$defs"], "Error": ERROR_SCHEMA}}
        for operation in (operation for path in schema["paths"].values() for operation in path.values()):
            operation["responses"].pop("422", None)  # FastAPI's own, which are answered with 400 here
        app.openapi_schema = schema
    return app.openapi_schema
