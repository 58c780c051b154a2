"""Waits for the Secrets with API keys and TLS certificate, and reports which is missing. The pod mounts them as optional.

If they were required, a pod without one would stay in ContainerCreating, and no agent could report why.
"""

import asyncio
import signal
from pathlib import Path

import structlog
from starling_engine.errors import ConfigError

from starling_agent.api_keys import ApiKeys
from starling_agent.contract.config import EndpointConfig
from starling_agent.report_state import ReportState

CHECK_SECONDS = 1.0
log = structlog.get_logger("starling.agent")


async def wait_for_secrets(endpoint: EndpointConfig, state: ReportState) -> bool:
    """Waits until all Secrets are there. Returns False after SIGTERM or SIGINT. Nothing is served meanwhile."""
    if missing_secret(endpoint) is None:
        return True
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    while (cause := missing_secret(endpoint)) is not None and not ended.is_set():
        if state.report.last_error != cause:
            log.warning("waits for a Secret", cause=cause)
        state.update(last_error=cause)
        try:
            await asyncio.wait_for(ended.wait(), CHECK_SECONDS)
        except TimeoutError:
            continue
    state.update(last_error=None)
    return not ended.is_set()


def missing_secret(endpoint: EndpointConfig) -> str | None:
    """Names the missing Secret and how to create it; None when all can be used."""
    if endpoint.api_key_secret is not None and endpoint.api_key_file is not None:
        file = Path(endpoint.api_key_file)
        try:
            ApiKeys((), file)
        except ConfigError:
            return (
                f"endpoint.apiKeySecret: Secret {endpoint.api_key_secret!r} is missing, or its key {file.name!r} is empty; "
                f"create it: kubectl create secret generic {endpoint.api_key_secret} --from-literal={file.name}=KEY"
            )
    if endpoint.tls_secret is not None:
        files = [Path(path) for path in (endpoint.tls_cert_file, endpoint.tls_key_file) if path is not None]
        if not all(file.is_file() for file in files):
            return (
                f"endpoint.tlsSecret: Secret {endpoint.tls_secret!r} is missing, or lacks tls.crt or tls.key; "
                f"create it: kubectl create secret tls {endpoint.tls_secret} --cert=FILE --key=FILE"
            )
    return None
