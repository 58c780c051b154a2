"""The proof by use, where nobody answers."""

import asyncio
import socket

from starling_agent.node.first_token import FirstToken


async def test_a_connection_that_is_dropped_is_given_up_for_another_one() -> None:
    """As a Service does whose endpoints are changing: no refusal, nothing at all."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        async with asyncio.timeout(30):
            cause = await FirstToken("m", lambda: None).ask(f"http://127.0.0.1:{address[1]}/v1")
        for each in waiting:
            each.close()
    assert cause == f"http://127.0.0.1:{address[1]}/v1/completions: ConnectTimeout: "
