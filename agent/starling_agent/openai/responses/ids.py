"""The ids of responses. An id names the pod that made the response, so that a router can send requests about it there.

Its form is `resp_<group>-<node>_<32 hex digits>`, with a pod's name as `contract.identity` has it. `starling serve` is no pod: the
ids of its responses are `resp_<32 hex digits>`.
"""

import re
import secrets
from dataclasses import dataclass

from starling_agent.http.errors import ApiError

_POD = r"(?P<group>[A-Za-z0-9.-]{1,80})-(?P<node>[0-9]{1,4})"
_ID = re.compile(rf"resp_(?:{_POD}_)?[0-9a-f]{{32}}")


@dataclass(frozen=True, slots=True)
class ResponsePod:
    """The pod that made a response: its group, and its node in that."""

    group: str
    node: int


def new_response_id(pod: str) -> str:
    """Makes an id. `pod` is this pod's name, empty for none."""
    random = secrets.token_hex(16)
    return f"resp_{pod}_{random}" if re.fullmatch(_POD, pod) else f"resp_{random}"


def is_response_id(text: str) -> bool:
    """Says if a text has the form of an id. Such a text is also the name of a file, and never a path."""
    return _ID.fullmatch(text) is not None


def pod_of(response_id: str) -> ResponsePod | None:
    """Returns which pod made a response; None for what is no id, or names none."""
    match = _ID.fullmatch(response_id)
    return ResponsePod(match["group"], int(match["node"])) if match is not None and match["group"] else None


def not_found(response_id: str, pod: str, *, is_shared: bool) -> ApiError:
    """Makes the 404 of a response that this pod does not have. `is_shared`: it would have those of other pods."""
    message = f"there is no response {response_id[:200]!r}; it was deleted, not stored, too old, or made room for later ones"
    maker = pod_of(response_id)
    if maker is not None and not is_shared and f"{maker.group}-{maker.node}" != pod:
        made_by = f"node {maker.node} of the group {maker.group} made it"
        message = f"there is no response {response_id[:200]!r} here: {made_by}, and without a shared folder it alone has it"
    return ApiError(404, message, code="response_not_found")
