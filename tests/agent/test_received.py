"""What answers an agent may be anything: its words are bounded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starling_agent.group.membership_service import Unreachable
from starling_agent.group.remote_membership import RemoteMembershipService
from starling_agent.http.received import MOST_BYTES
from starling_agent.node.first_token import FirstToken

from tests.agent.group.test_decisions import member


@contextlib.asynccontextmanager
async def talker(status: int) -> AsyncIterator[str]:
    """Host and port of what answers much more than anybody wants to know."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(f"HTTP/1.1 {status} X\r\n\r\n".encode())
            for _number in range(32):
                writer.write(b" " * MOST_BYTES)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(30):
        yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname())


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_that_is_too_long_is_not_kept(status: int, tmp_path: Path) -> None:
    words = f"longer than {MOST_BYTES} bytes"
    (tmp_path / "token").write_text("t")
    async with talker(status) as address:
        assert words in (await FirstToken("m", lambda: None).ask(f"http://{address}/v1") or "")
        with pytest.raises(Unreachable, match=words):
            await RemoteMembershipService(address, tmp_path / "token").ask(member(1), None, 5)
