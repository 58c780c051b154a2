"""The state of the service, as the operator told it, in the errors of requests that no group takes."""

import math
import time

from starling_agent.contract.router_report import ServiceNotice
from starling_agent.http.errors import ApiError

KEPT_SECONDS = 60.0
"""A notice of an operator that has been gone for so long says nothing any more. It comes anew at least every 30 s."""
PHASE = "X-Starling-Phase"
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 5, 600
_NO_NOTICE = ServiceNotice()


class ServiceState:
    """The newest notice. Routers that no operator knows have none."""

    def __init__(self) -> None:
        self._notice, self._at = _NO_NOTICE, 0.0
        self.models: list[str] = []
        """Names that the service has, whether a group serves or not."""

    def take(self, notice: ServiceNotice) -> None:
        self._notice, self._at = notice, time.monotonic()
        self.models = notice.models or self.models

    def no_backend(self, why: str, *, with_message: bool = True) -> ApiError:
        """Returns the error of a request that nobody takes, and `why`, with what the operator says and when to try again.

        The message of the operator's condition names pods and what they load: it is for those alone who may use the service.
        """
        notice = self._notice if time.monotonic() - self._at < KEPT_SECONDS else _NO_NOTICE
        said = f"{notice.phase}: {notice.message}" if with_message else notice.phase
        parts = [why, *([said] if notice.phase else [])]
        headers = {"Retry-After": str(_RETRY_SECONDS), **({PHASE: notice.phase} if notice.phase else {})}
        if notice.eta_seconds is None:
            parts.append("try again soon")
        else:
            parts.append(f"try again in about {max(1, math.ceil(notice.eta_seconds))} s")
            headers["Retry-After"] = str(min(_MOST_RETRY_SECONDS, max(1, math.ceil(notice.eta_seconds))))
        return ApiError(503, "; ".join(parts), kind="server_error", code="no_backend", headers=headers)
