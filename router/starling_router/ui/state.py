"""Reads what the page at /ui shows, and `GET /ui/state` answers, from what the router knows already."""

import uuid
from collections.abc import Mapping
from typing import Literal

import msgspec
from starling_agent.contract.backend import BackendState
from starling_agent.version import starling_version

from starling_router.accounts import Account, Accounts
from starling_router.backend import Backend, Backends
from starling_router.canary import CanaryTraffic
from starling_router.metrics import RouterMetrics, value


class UiBackend(msgspec.Struct):
    """One server.

    open                   requests that this router has open there
    pod, group, revision   as it said last; empty: it has none, or has said nothing yet
    load                   the fields of BackendLoad, as it said last; None: it does not say
    weight                 percent of requests that its revision gets while a canary runs; None: none runs
    """

    name: str
    ready: bool
    open: int
    pod: str = ""
    group: str = ""
    revision: str = ""
    load: dict[str, int] | None = None
    weight: int | None = None


class UiTenant(msgspec.Struct):
    """One tenant at this router.

    output_tokens_total   given so far, those of open answers included
    quota                 what is left of it, as headers of answers say it
    """

    name: str
    priority: int
    weight: float
    open: int
    held: int
    requests_total: int
    refused_total: int
    prompt_tokens_total: int
    output_tokens_total: int
    quota: dict[str, str]


class UiState(msgspec.Struct):
    """The router and its servers, as far as a key may see them. Those named total only grow while the router, `incarnation`, lives.

    sees                 all: servers, and tenants where there are; tenant: the key's own tenant alone
    known, ready         servers
    held                 requests that wait in this router
    prompt_tokens_total  of prompts that it has sent on, and those of them that it expected in caches; None: not for this key
    """

    incarnation: str
    release: str
    sees: Literal["all", "tenant"]
    models: list[str]
    known: int
    ready: int
    held: int
    prompt_tokens_total: int | None
    cached_tokens_total: int | None
    backends: list[UiBackend]
    tenants: list[UiTenant]


class UiView:
    """Reads the state. `states` has what each backend said last, by name."""

    def __init__(
        self,
        backends: Backends,
        states: Mapping[str, BackendState],
        accounts: Accounts,
        metrics: RouterMetrics,
        canary: CanaryTraffic,
    ) -> None:
        self._backends, self._states, self._accounts, self._metrics = backends, states, accounts, metrics
        self._canary = canary
        self._incarnation = uuid.uuid4().hex

    def state(self, account: Account) -> UiState:
        """Returns what an account may see: without tenants, and for a tenant that `sees_all`, everything."""
        of_tenants = self._accounts.of_tenants
        sees_all = not of_tenants or account.tenant.sees_all
        tenants = [_tenant(each) for each in (of_tenants if sees_all else [account])]
        metrics = self._metrics
        return UiState(
            incarnation=self._incarnation,
            release=starling_version(),
            sees="all" if sees_all else "tenant",
            models=sorted({model for state in self._states.values() for model in state.models}),
            known=len(self._backends.all),
            ready=len(self._backends.ready),
            held=value(metrics.held) if sees_all else tenants[0].held,
            prompt_tokens_total=value(metrics.prompt_tokens) if sees_all else None,
            cached_tokens_total=value(metrics.cached_tokens) if sees_all else None,
            backends=[self._backend(each) for each in self._backends.all] if sees_all else [],
            tenants=tenants,
        )

    def _backend(self, backend: Backend) -> UiBackend:
        if (state := self._states.get(backend.name)) is None:
            return UiBackend(backend.name, backend.ready, backend.open)
        load = None if state.load is None else state.load.model_dump()
        weight = self._canary.weight_of(state.revision)
        return UiBackend(backend.name, backend.ready, backend.open, state.pod, state.group, state.revision, load, weight)


def _tenant(account: Account) -> UiTenant:
    tenant, counters = account.tenant, account.counters
    assert counters is not None
    return UiTenant(
        name=tenant.name,
        priority=tenant.priority,
        weight=tenant.weight,
        open=account.quota.open,
        held=value(counters.held),
        requests_total=value(counters.requests),
        refused_total=counters.all_refused,
        prompt_tokens_total=value(counters.prompt_tokens),
        output_tokens_total=account.output,
        quota=account.quota.headers(),
    )
