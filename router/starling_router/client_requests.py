"""Checks what of clients' requests a router sends on, which of them wait where no backend takes them, and which cost something."""

from collections.abc import Mapping

from starlette.types import Scope
from starling_agent.http.auth import OPEN_PATHS
from starling_agent.http.errors import ApiError, invalid
from starling_agent.openai.stream_record import RESUME_TYPE

SESSIONS = (b"x-session-token", b"x-session-id")
_TEXTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
_VECTORS = frozenset(
    {"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
)
MODEL_PATHS = _TEXTS | _VECTORS
"""POST there has a model compute, and costs tokens."""
TOKENIZER_PATHS = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""POST there needs a server, which alone has the tokenizer, and costs nothing."""
_WORK = MODEL_PATHS | TOKENIZER_PATHS
_OTHER_PATHS = OPEN_PATHS | {"/v1/models", "/tokenizer_info", "/redoc"}
_OTHERS_BELOW = ("/v1/models/", "/v1/responses/")
_OF_ONE_SERVER = frozenset({"/sleep", "/wake_up", "/is_sleeping"})


def check_request(scope: Scope) -> None:
    """Raises ApiError for what is no client's to ask: routers show their token with all that they send on."""
    path: str = scope["path"]
    if not path.startswith("/") or b"#" in (scope.get("raw_path") or b""):
        raise invalid("the target of a request has to be a path")
    if path == "/backend" or path.startswith("/backend/") or path in _OF_ONE_SERVER:
        raise ApiError(404, f"{path} is of one server, and not sent on to any; ask that server itself", code="not_found")
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if kind.partition(b";")[0].strip().lower() == RESUME_TYPE.encode():
        raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")


def is_work(scope: Scope) -> bool:
    """Says whether a request is one that waits for a backend, and for which a service at zero is woken."""
    return scope["method"] == "POST" and scope["path"] in _WORK


def costs_tokens(scope: Scope) -> bool:
    """Says whether a request is one that a quota limits. All others are let in, whatever their tenant owes or has open."""
    return scope["method"] == "POST" and scope["path"] in MODEL_PATHS


def is_known(path: str) -> bool:
    """Says whether servers have something at a path, which they say themselves while one is ready."""
    return path in _WORK or path in _OTHER_PATHS or path.startswith(_OTHERS_BELOW)


def session_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Returns the session that a request says it is of."""
    return next((headers[name].decode("latin-1") for name in SESSIONS if name in headers), None)
