"""A server that computes nothing, for routers in front of it: it streams words at a set rate, or answers at once.

python bench/router_stub.py PORT TOKENS TOKENS_A_SECOND
"""

import asyncio
import json
import sys
from typing import cast

import uvloop

STATE = {"ready": True, "open": 0, "models": ["m"], "block_size": 16}
"""As GET /backend has it."""
MESSAGE = {"role": "assistant", "content": "yes"}
ANSWER = {
    "id": "a",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 60, "completion_tokens": 1, "total_tokens": 61},
}
EVENT = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
EVENT |= {"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STATE_ANSWER, CHAT_ANSWER = whole(STATE), whole(ANSWER)
WORD = chunk(b"data: %b\n\n" % json.dumps(EVENT).encode())
LAST = chunk(b"data: [DONE]\n\n") + chunk(b"")


class Stub(asyncio.Protocol):
    """One connection, on which requests come one after the other."""

    def __init__(self, tokens: int, rate: float) -> None:
        self._tokens, self._pause = tokens, 1 / rate
        self._received = b""
        self._next: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, _: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length:")
        size = int(length.split(b"\r\n")[0]) if length else 0
        if not end or len(rest) < size:
            return
        self._received = b""
        if head.startswith(b"GET"):
            self._transport.write(STATE_ANSWER)
        elif b'"stream": true' in rest:
            self._transport.write(STREAM + WORD)
            self._stream(self._tokens - 1, asyncio.get_running_loop().time())
        else:
            self._transport.write(CHAT_ANSWER)

    def _stream(self, left: int, last: float) -> None:
        """Writes the words that are left, each at its time whatever the ones before took."""
        due = last + self._pause
        self._next = asyncio.get_running_loop().call_at(due, self._write, left, due)

    def _write(self, left: int, due: float) -> None:
        if not left:
            self._transport.write(LAST)
            return
        self._transport.write(WORD)
        self._stream(left - 1, due)


async def main(port: int, tokens: int, rate: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Stub(tokens, rate), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
