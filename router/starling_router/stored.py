"""Requests about responses that a backend has stored: their ids name the pod that did."""

import re

import msgspec
from starling_agent.openai.responses.ids import pod_of

_PATH = re.compile(r"/v1/responses/(?P<id>[^/]+)(/.*)?")


def named_response(path: str) -> str | None:
    """Returns the id of the response in a path: requests there make nothing."""
    match = _PATH.fullmatch(path)
    return None if match is None else match["id"]


def response_of(path: str, previous_response_id: bytes) -> str | None:
    """Returns the id of the stored response that a request is about, from its path or its body."""
    if (named := named_response(path)) is not None:
        return named
    try:
        given = msgspec.json.decode(previous_response_id) if previous_response_id else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return given if isinstance(given, str) else None


def pod_name(response_id: str) -> str | None:
    """Returns the pod that an id names; None where it names none."""
    pod = pod_of(response_id)
    return None if pod is None else f"{pod.group}-{pod.node}"
