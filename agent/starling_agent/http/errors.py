"""Errors, which have the fields of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`, for every status."""

import math
import re
from collections.abc import Mapping

import msgspec
from msgspec import structs
from starling_engine.errors import (
    EngineAsleep,
    EngineDead,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    SleepFailed,
    SleepRefused,
)

CONTEXT_LENGTH = "context_length_exceeded"
MAX_PARAM = 200
"""Characters of a field's name that an answer repeats; a name can be as long as a body."""

ASLEEP_RETRY_SECONDS = 10
"""The engine has to be woken first, by a person or a program."""


class ErrorDetail(msgspec.Struct):
    """`param` names the request's field; `code` is a stable word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An answer with a status other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, kind, param[:MAX_PARAM] if param else param, code)
        self.headers = dict(headers or {})

    @property
    def message(self) -> str:
        """The message as it is sent: it says which field it is about, since many programs show nothing but the message.

        What a context is too short for begins as OpenAI's message does, by which clients know it.
        """
        message, param = self.detail.message, self.detail.param
        if not param or self.detail.code == CONTEXT_LENGTH:
            return message
        name = param.rpartition(".")[2].partition("[")[0]
        return message if re.search(rf"\b{re.escape(name)}\b", message) else f"{param}: {message}"

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(structs.replace(self.detail, message=self.message)))


class ShuttingDown(RequestFailed):
    """The server ends before this request could finish."""


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Makes an answer of an exception; no other place does. An unknown exception is 500, and its text stays in the log."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return invalid(error.message, error.param, CONTEXT_LENGTH)
        case InvalidRequest():
            return invalid(error.message, error.param)
        case QueueFull():
            return _busy(error)
        case EngineAsleep():
            return asleep(str(error))
        case SleepRefused():
            return ApiError(409, str(error), code="sleep_refused")
        case SleepFailed():
            return ApiError(500, str(error), kind="server_error", code="sleep_failed")
        case EngineDead():
            return ApiError(503, str(error), kind="server_error", code="engine_dead")
        case ShuttingDown():
            return ApiError(503, str(error), kind="server_error", code="shutting_down", headers={"Retry-After": "5"})
        case RequestFailed():
            return ApiError(500, str(error), kind="server_error", code="request_failed")
    message = "internal error; the server's log has it under this request id"
    return ApiError(500, message, kind="server_error", code="internal_error")


def asleep(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="engine_asleep", headers={"Retry-After": str(ASLEEP_RETRY_SECONDS)})


def _busy(error: QueueFull) -> ApiError:
    wait = str(max(1, math.ceil(error.retry_after)))
    return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers={"Retry-After": wait})
