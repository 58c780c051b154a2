"""Clients of routers and servers: chats that stream, and what servers count."""

import json
import random
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part place case
week company system program question work government number night point home water room mother area money story fact month lot
right study book eye job word business issue side kind head house service friend father power hour game line end
"""
"""Each is one token of most tokenizers, with the space before it."""


@dataclass(frozen=True)
class Reply:
    """An answer's text, and the seconds to its first piece."""

    text: str
    first: float


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


class Chats:
    """Sends chats to one URL, as the owner of a key if one is given."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url, self._headers = url, {} if key is None else {"Authorization": f"Bearer {key}"}

    async def __aenter__(self) -> "Chats":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600), headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, messages: Sequence[Mapping[str, str]], tokens: int) -> Reply:
        """Streams an answer of so many tokens. Ends the benchmark where there is none."""
        body = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, began, first = "", time.perf_counter(), 0.0
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{self._url} answered {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                if piece := _content(line):
                    first = first or time.perf_counter() - began
                    text += piece
        if not first:
            raise SystemExit(f"{self._url} gave an answer without text")
        return Reply(text, first)


def _content(line: bytes) -> str:
    """Returns the text that a line of a stream has."""
    if not line.startswith(b"data: {"):
        return ""
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise SystemExit(f"a stream ended with an error: {event['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def scraped(url: str) -> dict[str, dict[str, float]]:
    """Returns a server's metrics by name and labels, these as they stand in /metrics."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line and not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                name, _, labels = series.partition("{")
                found[name][labels.rstrip("}")] = float(value)
    return found
