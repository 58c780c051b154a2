"""Reading a request's body, without a server."""

import pytest
from fastapi import Request
from starling_agent.openai import request_body
from starling_agent.openai.protocol.tokens import DetokenizeRequest


def request(receive, content_type: bytes = b"application/json") -> Request:
    return Request({"type": "http", "method": "POST", "headers": [(b"content-type", content_type)]}, receive)


async def test_a_body_in_pieces_is_read_whole():
    pieces = [b'{"tok', b'ens": [1, ', b"2]}"]

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": len(pieces) > 0}

    assert (await request_body.body_of(DetokenizeRequest)(request(receive))).tokens == [1, 2]


@pytest.mark.parametrize(
    "kind", [b"application/json", b"application/json; charset=utf-8", b"Application/JSON", b"application/x+json"]
)
async def test_every_content_type_of_json_is_accepted(kind):
    async def receive():
        return {"type": "http.request", "body": b'{"tokens": []}', "more_body": False}

    assert (await request_body.body_of(DetokenizeRequest)(request(receive, kind))).tokens == []
