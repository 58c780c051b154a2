"""Turns flags of `starling router` into what a router takes. Imports here are heavy, so the command imports this when it runs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from starling_agent.api_keys import ApiKeys
from starling_agent.contract.listening import url_here
from starling_engine.errors import ConfigError
from starling_router.discovery import BackendsFile, BackendSources, BackendsService, backend_url
from starling_router.tenants import NO_TENANTS, Tenancy

SATURATION_STEPS = 0.5
"""A server with so many steps of prompts to compute gets no more: they would wait there by arrival, and here they do by turns."""


def tenancy_of(
    file: Path | None,
    keys: ApiKeys,
    token_file: Path | None,
    *,
    tenant_keys_dir: Path | None,
    routers: int | None,
    saturation_steps: float | None,
) -> tuple[Tenancy, float | None]:
    """Returns the tenants, and the steps of prompts that servers may have waiting; None: any. Raises ConfigError."""
    if file is None:
        of_tenants = {"tenant_keys_dir": tenant_keys_dir, "routers": routers, "saturation_steps": saturation_steps}
        if given := [name for name, value in of_tenants.items() if value is not None]:
            raise ConfigError("needs --tenants-file", given[0])
        return NO_TENANTS, None
    if keys:
        raise ConfigError("tenants have the keys: leave out --api-key, --api-key-file and $STARLING_API_KEY", "tenants_file")
    if token_file is None:
        raise ConfigError("needs --router-token-file, by which servers believe whose requests are", "tenants_file")
    steps = SATURATION_STEPS if saturation_steps is None else saturation_steps
    return Tenancy.read(file, tenant_keys_dir, routers or 1), steps


def sources_of(
    urls: Sequence[str], file: Path | None, service: str | None, port: int, *, has_epp: bool
) -> tuple[BackendSources, str]:
    """Returns where the servers are, and the same in words. Raises ConfigError."""
    if file is not None and has_epp:
        why = "goes not with --epp-port: a gateway's endpoints are given as URLs, or by --backends-service"
        raise ConfigError(why, "backends_file")
    sources = BackendSources(
        tuple(backend_url(text, "backends") for text in urls),
        BackendsFile(file) if file is not None else None,
        BackendsService(service, port) if service is not None else None,
    )
    if not sources.given and not sources.may_change:
        raise ConfigError("must be URLs of servers; or give --backends-service or --backends-file", "backends")
    count = len(sources.given)
    given = f"{count} server{'s' if count > 1 else ''}" if count else ""
    return sources, " and ".join(filter(None, (given, service, f"the servers in {file}" if file else "")))


def announcing(words: str, host: str) -> Callable[[int], None]:
    """Returns what says that the router serves, once its port is known."""

    def serving(port: int) -> None:
        typer.echo(f"routing to {words} at {url_here(host, port)}/v1 (see /ui there)", err=True)

    return serving
