"""Answers read within bounds: what listens at another's address may not be who it should be, and must not fill this process."""

from typing import Any

import httpx

MOST_BYTES = 1 << 20
"""Twice the view of a group of a thousand nodes."""


class AnswerTooLong(httpx.HTTPError):
    """An answer that goes on past its bound; nobody knows for how long."""


async def post(client: httpx.AsyncClient, url: str, **request: Any) -> tuple[int, bytes]:
    """The answer's status and body. Raises httpx.HTTPError, of which AnswerTooLong is one."""
    # A compressed answer could be a thousand times as long as what is counted: none is asked for, and none is unpacked.
    client.headers["Accept-Encoding"] = "identity"
    body = bytearray()
    async with client.stream("POST", url, **request) as answer:
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > MOST_BYTES:
                raise AnswerTooLong(f"the answer is longer than {MOST_BYTES} bytes")
    return answer.status_code, bytes(body)
