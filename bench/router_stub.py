"""A server that computes nothing, for routers in front of it: it streams words at a set rate, or answers at once.

python bench/router_stub.py PORT TOKENS TOKENS_A_SECOND [ROUTER_TOKEN_FILE MODEL]

With a token it gives routers what an agent of that model gives them: its tokenizer, what comes and goes in a full cache, and notes
between the events of streams.
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import cast

import msgspec
import uvloop
from starling_agent.contract.router import PROOF_PATH, token_proof
from starling_agent.openai.prompting import Prompting
from starling_agent.openai.prompting_bundle import PromptingBundle, PromptingBundles
from starling_agent.openai.stream_record import (
    LAST_NOTE,
    NOTE_BEGIN,
    NOTE_END,
    RESUMABLE,
    YES,
    EndNote,
    GainNote,
    Note,
    PromptNote,
    StreamNote,
)
from starling_agent.settings import ServerSettings
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.kv.changes import CacheChanges, CoreChanges
from starling_engine.model_config.config import load_model_config

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
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
LINES = b"HTTP/1.1 200 OK\r\ncontent-type: application/jsonl\r\ntransfer-encoding: chunked\r\n\r\n"
ASKS_NOTES = f"{RESUMABLE}: {YES}".encode()
BODY_BYTES = 50
"""Bytes of a body that are one block: words of the benchmark have two tokens of the small model, which is so many of 16."""
CACHED_BLOCKS, STEP_SECONDS = 20_000, 0.02
"""Blocks of the full cache, and how often a step tells which have come and gone."""
_encode = msgspec.json.Encoder().encode


def whole(data: bytes, kind: str = "application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind.encode(), len(data), data)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def noted(event: bytes, note: Note) -> bytes:
    return chunk(event + NOTE_BEGIN + _encode(note) + NOTE_END)


CHAT_ANSWER = whole(json.dumps(ANSWER).encode())
_WORD, _DONE = b"data: %b\n\n" % json.dumps(EVENT).encode(), b"data: [DONE]\n\n"
FIRST = WORD = chunk(_WORD)
LAST = chunk(_DONE) + chunk(b"")
_GAIN = GainNote(0, [1234])
NOTED_FIRST = noted(_WORD, Note([_GAIN], prompts=[PromptNote(0, 0)], stream=StreamNote("chatcmpl-a", 1, [2**62])))
NOTED_WORD = noted(_WORD, Note([_GAIN]))
NOTED_LAST = noted(_DONE, Note([], ends=[EndNote(0, "length", None)])) + chunk(LAST_NOTE) + chunk(b"")


class AgentAnswers:
    """Answers that routers of the same token get. Each prompt brings new blocks into the cache, and the oldest ones go."""

    def __init__(self, token: bytes, bundle: PromptingBundle) -> None:
        self._token = token
        self.prompting = whole(bundle.data, "application/gzip")
        self.state = whole(json.dumps(STATE | {"shows_cache": True, "prompting": bundle.digest, "room": 256}).encode())
        self.followers: list[asyncio.Transport] = []
        self._hashes = itertools.count(2**63)
        self._blocks = list(itertools.islice(self._hashes, CACHED_BLOCKS))
        self._came = 0

    def proof(self, target: bytes) -> bytes:
        return whole(json.dumps({"proof": token_proof(self._token, target.partition(b"?nonce=")[2])}).encode())

    def follow(self, router: asyncio.Transport) -> None:
        self.followers.append(router)
        router.write(LINES + _line(CacheChanges(anew=True)) + _line(CacheChanges(stored=self._blocks)))

    def take(self, body: bytes) -> None:
        self._came += max(1, len(body) // BODY_BYTES)

    async def tell(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            if self._came:
                stored = list(itertools.islice(self._hashes, self._came))
                removed, self._blocks = self._blocks[: self._came], [*self._blocks[self._came :], *stored]
                self._came = 0
                for router in self.followers:
                    router.write(_line(CacheChanges(stored=stored, removed=removed)))


def _line(changes: CacheChanges) -> bytes:
    return chunk(_encode(CoreChanges(changes)) + b"\n")


class Stub(asyncio.Protocol):
    """One connection, on which requests come one after the other."""

    def __init__(self, tokens: int, rate: float, agent: AgentAnswers | None) -> None:
        self._tokens, self._pause, self._agent = tokens, 1 / rate, agent
        self._received = b""
        self._next: asyncio.TimerHandle | None = None
        self._word, self._last = WORD, LAST

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, _: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._agent is not None and self._transport in self._agent.followers:
            self._agent.followers.remove(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length:")
        size = int(length.split(b"\r\n")[0]) if length else 0
        if not end or len(rest) < size:
            return
        self._received = b""
        if head.startswith(b"GET"):
            self._answer(head.split(b" ")[1])
            return
        if self._agent is not None:
            self._agent.take(rest)
        if b'"stream": true' in rest:
            self._begin(has_notes=ASKS_NOTES in head.lower())
        else:
            self._transport.write(CHAT_ANSWER)

    def _answer(self, target: bytes) -> None:
        if self._agent is None:
            self._transport.write(whole(json.dumps(STATE).encode()))
        elif target.startswith(PROOF_PATH.encode()):
            self._transport.write(self._agent.proof(target))
        elif target == b"/backend/prompting":
            self._transport.write(self._agent.prompting)
        elif target == b"/backend/cache":
            self._agent.follow(self._transport)
        else:
            self._transport.write(self._agent.state)

    def _begin(self, *, has_notes: bool) -> None:
        first, self._word, self._last = (NOTED_FIRST, NOTED_WORD, NOTED_LAST) if has_notes else (FIRST, WORD, LAST)
        self._transport.write(STREAM + (ASKS_NOTES + b"\r\n" if has_notes else b"") + b"\r\n" + first)
        self._stream(self._tokens - 1, asyncio.get_running_loop().time())

    def _stream(self, left: int, last: float) -> None:
        """Writes the words that are left, each at its time whatever the ones before took."""
        due = last + self._pause
        self._next = asyncio.get_running_loop().call_at(due, self._write, left, due)

    def _write(self, left: int, due: float) -> None:
        if not left:
            self._transport.write(self._last)
            return
        self._transport.write(self._word)
        self._stream(left - 1, due)


async def agent_answers(token: bytes, model: Path) -> AgentAnswers:
    config, settings = load_model_config(model), ServerSettings()
    prompting = Prompting(Tokenizer.load(model), settings, config.vocab_size, config.max_position, max_waiting=lambda: 1)
    return AgentAnswers(token, await PromptingBundles(prompting).made())


async def main(port: int, tokens: int, rate: float, token: bytes | None, model: Path) -> None:
    agent = None if token is None else await agent_answers(token, model)
    server = await asyncio.get_running_loop().create_server(lambda: Stub(tokens, rate, agent), "127.0.0.1", port, backlog=1024)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve_forever())
        if agent is not None:
            tasks.create_task(agent.tell())


if __name__ == "__main__":
    port, tokens, rate, *files = sys.argv[1:]
    token = Path(files[0]).read_bytes() if files else None
    uvloop.run(main(int(port), int(tokens), float(rate), token, Path(files[-1] if files else "")))
