"""Answers by itself, while no group serves, what is to wake no service.

That is `GET /v1/models`, by the names that the operator told, and paths that no server has.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope
from starling_agent.http.error_forms import is_anthropic
from starling_agent.http.errors import ApiError

from starling_router.backend import Backends
from starling_router.client_requests import is_known

MODELS = "/v1/models"
_STARTED_AT = int(time.time())


def answer_without_servers(scope: Scope, backends: Backends, names: Sequence[str]) -> Response | None:
    """Answers a request for models while no server is ready, if it is one and they are known.

    Raises as `_models_answer` does, and ApiError for a path that no server has.
    """
    if backends.ready:
        return None
    if not is_known(scope["path"]):
        raise ApiError(404, f"there is no {scope['path'][:200]}", code="not_found")
    if not names or not _is_model_list(scope):
        return None
    return _models_answer(scope, names)


def _is_model_list(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and (scope["path"] == MODELS or scope["path"].startswith(f"{MODELS}/"))


def _models_answer(scope: Scope, names: Sequence[str]) -> Response:
    """Answers with the list, or with the one that the path names, in the client's form. Raises ApiError for a name that is none."""
    card = _anthropic_card if is_anthropic(scope) else _card
    name = scope["path"].removeprefix(MODELS).removeprefix("/")
    if name and name not in names:
        message = f"the model {name[:200]!r} does not exist; this service has {', '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    if name:
        return _json(card(name))
    data: dict[str, Any] = {"data": [card(each) for each in names]}
    more = {"has_more": False, "first_id": names[0], "last_id": names[-1]} if is_anthropic(scope) else {"object": "list"}
    return _json(more | data)


def _json(shown: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(shown), media_type="application/json")


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _STARTED_AT, "owned_by": "starling"}


def _anthropic_card(name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(_STARTED_AT, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}
