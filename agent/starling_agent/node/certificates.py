"""Certificates are renewed while a node serves: a Secret that changes is a file that changes."""

import asyncio
from pathlib import Path
from typing import Never

import structlog

from starling_agent.file_stamp import file_stamp
from starling_agent.server.http_server import HttpServer
from starling_agent.settings import Tls

LOOK_SECONDS = 10.0
log = structlog.get_logger("starling.agent")


async def keep_renewed(server: HttpServer, tls: Tls, look_seconds: float = LOOK_SECONDS) -> Never:
    """Until it is cancelled. A pair that does not fit together, half written perhaps, is tried again at the next look."""
    used = _stamps(tls)
    while True:
        await asyncio.sleep(look_seconds)
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
