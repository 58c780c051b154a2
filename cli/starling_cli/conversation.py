"""A conversation with an OpenAI-compatible server."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Self

import httpx
from starling_agent.client.bounded import read_all_sync, read_lines

CONNECT_SECONDS = 5.0


class AnswerError(Exception):
    """The server answered with an error, before or in the middle of its stream."""


class Conversation:
    """Holds the messages so far. `ask` adds the question and the answer."""

    def __init__(self, url: str, api_key: str | None, options: dict[str, Any], system: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.Client(base_url=url.removesuffix("/").removesuffix("/v1"), headers=headers, timeout=timeout)
        self._options = {name: value for name, value in options.items() if value is not None}
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, question: str, show: Callable[[str], None], show_reasoning: Callable[[str], None] = lambda _: None) -> str:
        """Returns the whole answer; `show` gets it piece by piece, and a line's end. Raises AnswerError or httpx.HTTPError."""
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        for reasoning, piece in self._stream():
            if reasoning:
                show_reasoning(reasoning)
            if piece:
                show(piece)
                pieces.append(piece)
        show("\n")
        answer = "".join(pieces)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _stream(self) -> Iterator[tuple[str, str]]:
        """Yields pieces of the reasoning and of the answer."""
        body = {"messages": self.messages, "stream": True, **self._options}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise AnswerError(error_message(read_all_sync(response.iter_bytes())) or f"status {response.status_code}")
            for line in read_lines(response.iter_bytes()):
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                yield _texts(json.loads(data))


def _texts(chunk: dict[str, Any]) -> tuple[str, str]:
    """Returns the reasoning and the content of a chunk; servers have one of two names for the first."""
    if "error" in chunk:
        raise AnswerError(str(chunk["error"].get("message")))
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta", {})
    return str(delta.get("reasoning") or delta.get("reasoning_content") or ""), str(delta.get("content") or "")


def error_message(body: bytes) -> str | None:
    """Returns the message of an OpenAI-shaped error; None for anything else."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(message)
