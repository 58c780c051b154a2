"""Answers that an agent reads are bounded: any server may listen at the address."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starling_agent.client.agent_client import MOST_VIEW_BYTES
from starling_agent.client.bounded import MOST_BYTES
from starling_agent.file_token import FileToken
from starling_agent.group.leader import RemoteMembershipService, Unreachable
from starling_agent.node.first_token import FirstToken

from tests.agent.group.test_membership import member


@contextlib.asynccontextmanager
async def endless_server(status: int) -> AsyncIterator[str]:
    """Runs a server with a far too long answer; yields its host and port."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(f"HTTP/1.1 {status} X\r\n\r\n".encode())
            for _number in range(32):
                writer.write(b" " * MOST_VIEW_BYTES)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(30):
        yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname())


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_that_is_too_long_is_an_error(status: int, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    async with endless_server(status) as address:
        cause = await FirstToken("m", lambda: None, "p-0", FileToken(Path("/none"))).request(f"http://{address}/v1")
        assert f"longer than {MOST_BYTES} bytes" in (cause or "")
        with pytest.raises(Unreachable, match=f"longer than {MOST_VIEW_BYTES} bytes"):
            await RemoteMembershipService(address, tmp_path / "token").poll(member(1), None, 5)
