"""Certificates are renewed while a node serves: a Secret is mounted as files."""

import asyncio
from pathlib import Path
from typing import Never

import structlog

from starling_agent.file_stamp import file_stamp
from starling_agent.server.http_server import HttpServer
from starling_agent.settings import Tls

CHECK_SECONDS = 10.0
log = structlog.get_logger("starling.agent")


async def watch_certificate(server: HttpServer, tls: Tls, check_seconds: float = CHECK_SECONDS) -> Never:
    """Reloads the certificate when its files change, until cancelled. Files that cannot be used are tried again at each check."""
    used = _stamps(tls)
    while True:
        await asyncio.sleep(check_seconds)
        if (now := _stamps(tls)) == used:
            continue
        try:
            server.reload_certificate()
        except OSError as error:
            log.warning("the new certificate cannot be used yet", file=tls.cert_file, cause=str(error))
        else:
            used = now
            log.info("certificate renewed", file=tls.cert_file)


def _stamps(tls: Tls) -> tuple[object, ...]:
    return tuple(file_stamp(Path(file)) for file in (tls.cert_file, tls.key_file))
