"""JSON values over a pipe, each behind its length. Python's own JSON: clients send halves of surrogate pairs and huge integers."""

import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")


def write_frame(pipe: BinaryIO, value: Any) -> None:
    content = json.dumps(value).encode()
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> Any:
    """Raises EOFError where the pipe's other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return json.loads(_exactly(pipe, length))


def _exactly(pipe: BinaryIO, length: int) -> bytes:
    content = pipe.read(length)
    if len(content) < length:
        raise EOFError("the other process is gone")
    return content
