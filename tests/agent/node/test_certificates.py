"""A certificate renewed in its file is used for the next connection, if it is valid."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starling_agent.node.certificates import watch_certificate
from starling_agent.server.http_server import HttpServer, bind
from starling_agent.settings import Tls
from starling_engine.errors import ConfigError

from tests.agent.node.certificates import make_certificate


class ObservedServer(HttpServer):
    """Sets events when it tries a certificate, and when it has loaded one."""

    tried: asyncio.Event
    renewed: asyncio.Event

    def reload_certificate(self) -> None:
        self.tried.set()
        super().reload_certificate()
        self.renewed.set()


async def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(tmp_path: Path):
    certificate, key = make_certificate(tmp_path)
    tls = Tls(str(certificate), str(key))
    server, listener = ObservedServer(Starlette(), tls), bind("127.0.0.1", 0)
    server.tried, server.renewed = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(server.serve([listener])), asyncio.create_task(watch_certificate(server, tls, 0.05))]
    listener.listen()
    address = listener.getsockname()
    try:
        first = await asyncio.to_thread(ssl.get_server_certificate, address)
        certificate.write_text("half written")
        async with asyncio.timeout(20):
            await server.tried.wait()
        assert await asyncio.to_thread(ssl.get_server_certificate, address) == first and not server.renewed.is_set()
        make_certificate(tmp_path)
        async with asyncio.timeout(20):
            await server.renewed.wait()
        assert await asyncio.to_thread(ssl.get_server_certificate, address) != first
    finally:
        server.should_exit = True
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (certificate, _), (_, key) = make_certificate(tmp_path / "a"), make_certificate(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"tls_cert_file: .*cannot be used"):
        HttpServer(Starlette(), Tls(str(certificate), str(key)))


async def test_a_tls_handshake_has_the_time_limit_of_a_header(tmp_path: Path):
    certificate, key = make_certificate(tmp_path)
    server, listener = HttpServer(Starlette(), Tls(str(certificate), str(key)), read_seconds=0.1), bind("127.0.0.1", 0)
    listener.listen()
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    finally:
        writer.close()
        server.should_exit = True
        await serving
