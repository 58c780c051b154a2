"""Client of a server that speaks OpenAI's API. No field that only some servers know is sent."""

import json
import re
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from starling_agent.client.bounded import read_all_sync, read_lines

CONNECT_SECONDS = 5.0
MOST_BYTES = 4 << 20
"""Bound of a list of models, an error, and one event of a stream."""
_VERSION = re.compile(r"/v\d+\w*(/|$)")


class AnswerError(Exception):
    """The server answered with an error, before or in the middle of its stream."""


class ChatClient:
    """Raises AnswerError, BadAnswer for what is no answer of such a server, and httpx.HTTPError."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))
        self._root = api_root(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Returns the names of the models; none where the server has no list."""
        with self._http.stream("GET", f"{self._root}/models") as response:
            if response.status_code in (404, 405):
                return []
            body = _checked_body(response)
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise AnswerError(f"{self._root}/models is no list of models") from None

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a streamed answer."""
        with self._http.stream("POST", f"{self._root}/chat/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                _checked_body(response)
            for line in read_lines(response.iter_bytes(), MOST_BYTES):
                if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                    yield _chunk(data)


def api_root(url: str) -> str:
    """Returns the URL that routes are below: with `/v1`, unless it names a version already."""
    bare = url.rstrip("/")
    return bare if _VERSION.search(urlsplit(bare).path) else f"{bare}/v1"


def error_message(body: bytes | str) -> str | None:
    """Returns the message of an OpenAI-shaped error; None for anything else."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(message)


def _checked_body(response: httpx.Response) -> bytes:
    body = read_all_sync(response.iter_bytes(), MOST_BYTES)
    if response.status_code != 200:
        raise AnswerError(error_message(body) or f"status {response.status_code}")
    return body


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise AnswerError(f"the stream has an event that is no JSON object: {data[:100]}")
    if chunk.get("error"):
        raise AnswerError(error_message(data) or str(chunk["error"]))
    return chunk
