"""The FastAPI application: its routes, errors and middleware."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starling_engine.errors import EngineAsleep, StarlingError

from starling_agent.http.error_forms import error_body
from starling_agent.http.errors import ApiError, as_api_error
from starling_agent.http.middleware_stack import middleware_stack
from starling_agent.http.open_requests import ClientGone
from starling_agent.openai import chat, completions, embeddings, models, probes, scoring, sleeping, tokens
from starling_agent.openai.anthropic import routes as anthropic_routes
from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.protocol.base import RequestModel, field_path
from starling_agent.openai.responses import routes as responses_routes
from starling_agent.version import starling_version

CLIENT_CLOSED_REQUEST = 499


def error_responses(errors: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Describes statuses for the page at /docs."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in errors.items()}


ERRORS = error_responses(
    {
        400: "The request is wrong: `param` names the field.",
        401: "The API key is missing or not known here.",
        403: "Routers alone are answered this, or answered at all here.",
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
        middleware=middleware_stack(endpoint.settings, endpoint.drain, endpoint.metrics.responses),
        redirect_slashes=False,
    )
    app.state.endpoint = endpoint
    modules = (chat, responses_routes, anthropic_routes, completions, embeddings, scoring, models, tokens, probes)
    routers = [module.router for module in modules]
    app.state.allowed = _allowed([*routers, sleeping.router])
    app.state.paths = [route.path for route in _routes(routers)]
    for router in routers:
        app.include_router(router, responses=ERRORS)
    if endpoint.engine.config.sleep_mode:
        app.include_router(sleeping.router, responses=ERRORS | SLEEP_ERRORS)
    for kind in (ApiError, StarlingError, HTTPException, RequestValidationError, ClientGone, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)
    # FastAPI's documents extend the schema so (Extending OpenAPI); its types do not know.
    app.openapi = lambda: _openapi(app, routers)  # type: ignore[method-assign]
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone | ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(error, EngineAsleep):
        log.info("refused", request_id=request.scope["state"]["request_id"], reason=str(error))
    api_error = _as_api_error(request, error)
    body = error_body(api_error, request.scope)
    return Response(body, api_error.status, headers=api_error.headers, media_type="application/json")


def _as_api_error(request: Request, error: Exception) -> ApiError:
    """Makes an ApiError of FastAPI's own errors, and of all others."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return ApiError(400, first["msg"], param=field_path(first["loc"][1:]), code="invalid_value")
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return ApiError(404, _not_there(request), code="not_found")
        if error.status_code == 405:
            message = f"{request.method} is not possible on {request.url.path[:200]}"
            allowed = request.app.state.allowed.get(getattr(request.scope.get("route"), "path", None))
            headers = error.headers if allowed is None else {"Allow": allowed}
            return ApiError(405, message, code="method_not_allowed", headers=headers)
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return as_api_error(error)


def _not_there(request: Request) -> str:
    """Names the route that is nearest: most often a base URL has /v1 once too often, or not at all."""
    path = request.url.path[:200]
    near = difflib.get_close_matches(path, request.app.state.paths, n=1, cutoff=0.8)
    return f"there is no {path}; {f'the nearest is {near[0]}' if near else '/docs lists what there is'}"


def _allowed(routers: Sequence[APIRouter]) -> dict[str, str]:
    """Returns the header Allow of each path. The framework's names the methods of one route, and a path may have several.

    It does not know HEAD, which is answered wherever GET is.
    """
    methods: dict[str, set[str]] = {}
    for route in _routes(routers):
        methods.setdefault(route.path, set()).update(route.methods or ())
    for names in methods.values():
        names.update({"HEAD"} if "GET" in names else ())
    return {path: ", ".join(sorted(names)) for path, names in methods.items()}


def _routes(routers: Sequence[APIRouter]) -> Iterator[APIRoute]:
    return (route for router in routers for route in router.routes if isinstance(route, APIRoute))


def _bodies(routers: Sequence[APIRouter]) -> Collection[type[RequestModel]]:
    """Returns the classes of all bodies, as the functions of routes name them."""
    hints = (hint for route in _routes(routers) for hint in get_type_hints(route.endpoint).values())
    return dict.fromkeys(hint for hint in hints if isinstance(hint, type) and issubclass(hint, RequestModel))


def _openapi(app: FastAPI, routers: Sequence[APIRouter]) -> dict[str, Any]:
    """Makes the schema of /docs. Routes read their bodies without FastAPI, so the bodies' schemas are added here."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, definitions = models_json_schema(
            [(body, "validation") for body in _bodies(routers)], ref_template="#/components/schemas/{model}"
        )
        schema["components"] = {"schemas": {**definitions["$defs"], "Error": ERROR_SCHEMA}}
        for operation in (operation for path in schema["paths"].values() for operation in path.values()):
            operation["responses"].pop("422", None)  # FastAPI's own, which are answered with 400 here
        app.openapi_schema = schema
    return app.openapi_schema
