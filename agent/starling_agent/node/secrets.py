"""Waits for the Secrets that the endpoint needs, and says which one is missing: a pod that cannot mount one says nothing."""

import asyncio
import signal
from pathlib import Path

import structlog
from starling_engine.errors import ConfigError

from starling_agent.api_keys import ApiKeys
from starling_agent.contract.config import EndpointConfig
from starling_agent.report_state import ReportState

LOOK_SECONDS = 1.0
log = structlog.get_logger("starling.agent")


async def secrets_are_there(endpoint: EndpointConfig, state: ReportState) -> bool:
    """Waits until all are. False: the node was told to end before. Nothing is served meanwhile."""
    if missing(endpoint) is None:
        return True
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    while (cause := missing(endpoint)) is not None and not ended.is_set():
        if state.report.last_error != cause:
            log.warning("waits for a Secret", cause=cause)
        state.update(last_error=cause)
        try:
            await asyncio.wait_for(ended.wait(), LOOK_SECONDS)
        except TimeoutError:
            continue
    state.update(last_error=None)
    return not ended.is_set()


def missing(endpoint: EndpointConfig) -> str | None:
    """Which Secret, and what to do; None when all that are named can be used."""
    if endpoint.api_key_secret is not None and endpoint.api_key_file is not None:
        file = Path(endpoint.api_key_file)
        try:
            ApiKeys((), file)
        except ConfigError:
            return (
                f"endpoint.apiKeySecret: Secret {endpoint.api_key_secret!r} is missing, or its key {file.name!r} is empty; "
                f"make it: kubectl create secret generic {endpoint.api_key_secret} --from-literal={file.name}=KEY"
            )
    if endpoint.tls_secret is not None:
        files = [Path(path) for path in (endpoint.tls_cert_file, endpoint.tls_key_file) if path is not None]
        if not all(file.is_file() for file in files):
            return (
                f"endpoint.tlsSecret: Secret {endpoint.tls_secret!r} is missing, or lacks tls.crt or tls.key; "
                f"make it: kubectl create secret tls {endpoint.tls_secret} --cert=FILE --key=FILE"
            )
    return None
