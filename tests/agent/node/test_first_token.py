"""The request for a first token."""

import asyncio
import socket
from pathlib import Path

import pytest
from starling_agent.file_token import FileToken
from starling_agent.node.first_token import FirstToken, local_url


async def test_a_connection_without_an_answer_is_given_up_soon() -> None:
    """A Service whose endpoints change may drop packets without a refusal."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        async with asyncio.timeout(30):
            cause = await FirstToken("m", lambda: None, "p-0", FileToken(Path("/none"))).request(
                f"http://127.0.0.1:{address[1]}/v1"
            )
        for each in waiting:
            each.close()
    assert cause == f"http://127.0.0.1:{address[1]}/v1/completions: ConnectTimeout: "


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [
        ("0.0.0.0", False, "http://127.0.0.1:8000"),
        ("::", True, "https://127.0.0.1:8000"),
        ("10.0.0.7", False, "http://10.0.0.7:8000"),
        ("fd00::7", False, "http://[fd00::7]:8000"),
    ],
)
def test_an_agent_reaches_its_own_endpoint_on_any_host(host: str, tls: bool, url: str):
    assert local_url(host, 8000, tls=tls) == url
