"""Headers of llm-d and of Gateway API Inference Extension that a router goes by. Those of before llm-d's have the second names.

docs/routing.md says what becomes of all the others.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from starlette.types import Scope
from starling_agent.http.errors import invalid

from starling_router.client_requests import is_work

_FLOW = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_MODEL = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")
DroppedReason = Literal["rejected-saturated", "rejected-ttl-expired", "rejected-shutting-down"]
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def dropped(reason: DroppedReason) -> dict[str, str]:
    """Returns the header of an answer that tells clients of llm-d why a request that waits, or would, is refused."""
    return {"x-llm-d-request-dropped-reason": reason}


def flow_of(scope: Scope) -> bytes | None:
    """Returns what takes turns with others where there are no tenants; None: the request does not say it."""
    return _value(scope, _FLOW)


def with_named_model(scope: Scope, body: bytes) -> bytes:
    """Returns the body for the model that a header names. Its other fields stay as they are, byte by byte.

    Raises ApiError where it has no fields.
    """
    name = _value(scope, _MODEL) if body and is_work(scope) else None
    if name is None:
        return body
    try:
        return msgspec.json.encode({**_FIELDS.decode(body), "model": name.decode()})
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"{_MODEL[0].decode()} needs UTF-8 and a body that is a JSON object: {error}", "model") from None


def _value(scope: Scope, names: Iterable[bytes]) -> bytes | None:
    headers: Mapping[bytes, bytes] = dict(scope["headers"])
    return next((value for name in names if (value := headers.get(name))), None)
