"""Jobs that meet every limit, done in copies: `python -m tests.engine.ipc.jobs`."""

import ctypes
import os
import time
from typing import Any

from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.ipc.limited_child import InCopies, Work, serve

KEPT: list[bytes] = []


def _prepare(settings: Any) -> Work:
    if settings["broken"]:
        raise ModelError("there is nothing to do jobs with")

    def work(job: dict[str, Any]) -> Any:
        match job:
            case {"say": text}:
                return [text, os.getpid()]
            case {"keep": count}:
                KEPT.append(bytes(count))
                return len(KEPT)
            case {"sleep": seconds}:
                return time.sleep(seconds)
            case {"signal": number}:
                return os.kill(os.getpid(), number)
            case {"read": address}:
                return ctypes.string_at(address)
            case {"exit": code}:
                os._exit(code)
            case {"power": exponent}:
                return (3**exponent).bit_length()
            case {"refuse": reason}:
                raise InvalidRequest(reason, "job.reason")
        raise ModelError("no such job")

    return work


if __name__ == "__main__":
    serve(_prepare, InCopies)
