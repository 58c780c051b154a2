"""Finds the tenant of a request by its key, and keeps what the tenant was given and may still have."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from starlette.types import Scope
from starling_agent.api_keys import tenant_owner
from starling_agent.contract.router import LONE, PRIORITY, ROUTER_TOKEN, TENANT
from starling_agent.file_token import FileToken
from starling_agent.http.auth import OPEN_PATHS, given_key, unauthorized

from starling_router.answer_usage import AnswerUsage
from starling_router.exact import OWNER
from starling_router.fair_share import FairShare
from starling_router.gateway_headers import flow_of
from starling_router.metrics import RouterMetrics, TenantCounters
from starling_router.quota import Quota, QuotaExceeded
from starling_router.stored import named_response
from starling_router.tenants import Tenancy, Tenant
from starling_router.upstream import RawHeaders, is_stream

MOST_PAID = 4096
"""Responses in the background of which an account knows what is paid: the last ones."""
MOST_FLOWS = 1000
"""Flows whose tokens are known: the last ones. Clients name them as they like."""
_FLOW = "flow"
"""The name of each flow's share: their own may have as many bytes as a header."""
_TOKEN, _TENANT, _PRIORITY, _LONE = (name.encode() for name in (ROUTER_TOKEN, TENANT, PRIORITY, LONE))


class Account:
    """One tenant's counts in this router: its fair share, quota and metrics, its open requests, and its answers' output tokens."""

    def __init__(self, tenant: Tenant, quota: Quota, counters: TenantCounters | None) -> None:
        self.tenant, self.quota = tenant, quota
        self.share = FairShare(tenant.name, tenant.priority, tenant.weight)
        self.counters = counters
        self.output = self.open = 0
        self._paid = OrderedDict[str, int]()
        self._flows = OrderedDict[int, FairShare]()

    @property
    def is_lone(self) -> bool:
        """True while a tenant has one request open that costs tokens."""
        return self.open == 1 and bool(self.tenant.name)

    def share_of(self, scope: Scope) -> FairShare:
        """Returns what a request takes its turns with: a tenant's share, or where there are none that of the flow it names."""
        flow = None if self.tenant.name else flow_of(scope)
        if flow is None:
            return self.share
        known = hash(flow)
        share = self._flows.setdefault(known, FairShare(_FLOW))
        self._flows.move_to_end(known)
        if len(self._flows) > MOST_FLOWS:
            self._flows.popitem(last=False)
        return share

    def headers(self) -> RawHeaders:
        """Returns the headers that say what is left of the quota."""
        return [(name.encode(), value.encode()) for name, value in self.quota.headers().items()]

    def backend_headers(self, token: FileToken | None, *, leads: bool = False) -> dict[bytes, bytes]:
        """Returns the headers by which backends that believe the token know a router, whose request it is, and whether it leads."""
        if token is None:
            return {}
        known = {_TOKEN: token.value}
        if self.tenant.name:
            known |= {_TENANT: self.tenant.name.encode(), _PRIORITY: str(self.tenant.priority).encode()}
            if leads:
                known[_LONE] = b"yes"
        return known

    def client_of(self, scope: Scope) -> bytes | None:
        """Returns what stands for a request's client: its tenant, or its key where there are none; None: it has neither."""
        return self.tenant.name.encode() or given_key(scope)

    def own(self, scope: Scope, token: FileToken | None) -> None:
        """Notes in a request's state that its prefixes are cached for the tenant, where backends know it by the token."""
        if token is not None and self.tenant.name:
            scope["state"][OWNER] = tenant_owner(self.tenant.name.encode())

    def check(self) -> None:
        """Raises QuotaExceeded where no prompt would come in now, so that none is read in vain."""
        with self._refusing():
            self.quota.check(1)

    @contextmanager
    def request(self, scope: Scope, tokens: int | None, share: FairShare) -> Iterator["Bill"]:
        """Admits a request with a prompt of so many tokens, and counts it to its end, in a share as well. Raises QuotaExceeded.

        One with None costs nothing by itself and is never refused. Yet the answer may have what is not paid yet.
        """
        with self._refusing(), nullcontext() if tokens is None else self.quota.request(tokens):
            bill = Bill(self, share, tokens or 0, named_response(scope["path"]))
            if self.counters is not None:
                self.counters.requests.inc()
            self.open += tokens is not None
            try:
                yield bill
            finally:
                self.open -= tokens is not None
                bill.end()

    def owed(self, response_id: str, output: int) -> int:
        """Returns the output tokens of a response in the background that are not paid yet, and takes them for paid."""
        paid = self._paid.get(response_id, 0)
        self._paid[response_id] = max(paid, output)
        if len(self._paid) > MOST_PAID:
            self._paid.popitem(last=False)
        return max(0, output - paid)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except QuotaExceeded as error:
            error.headers |= self.quota.headers()
            if self.counters is not None:
                self.counters.refused(error.cause).inc()
            raise


class Bill:
    """The tokens of one request. Its prompt is estimated until the answer's usage says how long it was."""

    def __init__(self, account: Account, share: FairShare, prompt: int, named: str | None) -> None:
        """`named` is the response that the request is about, and does not make: its prompt is paid, and its output may be."""
        self._account, self._share, self._prompt, self._named = account, share, prompt, named
        self._computed, self._output, self._attempt = 0, 0, 0
        self._was_sent = self._is_whole = False
        self._usage: AnswerUsage | None = None

    def sent(self, computed: int) -> None:
        """Counts the prompt tokens that a server has to compute, before it has: others have their turns meanwhile."""
        self._was_sent, self._attempt = True, computed
        self._compute(computed)

    def refused(self) -> None:
        """Notes that the server to which it was sent last computes nothing. One that began the answer before has computed it."""
        self._was_sent = self._usage is not None
        self._compute(-self._attempt)

    def begin(self, headers: RawHeaders) -> None:
        """Notes the headers of an answer, unless it goes on with one that another server began.

        Where there are neither tenants nor flows, nobody pays, and nothing is counted.
        """
        if self._usage is None and self._share.name:
            self._usage = AnswerUsage(streams=is_stream(headers))

    def gained(self, tokens: int) -> None:
        """Counts the tokens of a stream so far, which its notes tell: those of events that are not shown, too."""
        if self._usage is not None:
            self._usage.gained(tokens)

    def take(self, chunk: bytes) -> None:
        """Counts a chunk of the answer, of whichever server."""
        if self._usage is not None:
            self._usage.take(chunk)
            if self._named is None:
                self._give(self._usage.output)

    def complete(self) -> None:
        """Notes that the answer has come whole."""
        self._is_whole = True

    def end(self) -> None:
        """Counts by the usage at the answer's end, where there is one. What was never sent is free."""
        usage = self._usage or AnswerUsage(streams=False)
        usage.end(whole=self._is_whole)
        self._give(self._owed(usage))
        said = usage.prompt if self._named is None else None
        prompt = 0 if not self._was_sent else self._prompt if said is None else said
        self._account.quota.take(prompt - self._prompt)
        if self._was_sent and said is not None:
            self._compute(max(0, said - usage.cached) - self._computed)
        if (counters := self._account.counters) is not None:
            counters.prompt_tokens.inc(prompt)
            counters.output_tokens.inc(self._output)

    def _owed(self, usage: AnswerUsage) -> int:
        """Returns the output to count: of a response in the background what no answer before has shown. GET streams no others."""
        response = self._named if usage.streams and self._named is not None else usage.background_id
        if self._named is None:
            if response is not None:
                self._account.owed(response, usage.output)
            return usage.output
        return 0 if response is None or usage.prompt is None else self._account.owed(response, usage.output)

    def _compute(self, tokens: int) -> None:
        self._computed += tokens
        self._share.charge(tokens)

    def _give(self, output: int) -> None:
        more, self._output = output - self._output, output
        self._account.output += more
        self._share.charge(more)
        self._account.quota.take(more)


class Accounts:
    """All accounts. Without tenants there is one, without limits and metrics, and keys are checked before."""

    def __init__(
        self,
        tenancy: Tenancy,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, routers = tenancy.keys, tenancy.routers
        self._all = {each: Account(each, Quota(each, routers, clock), metrics.tenant(each.name)) for each in tenancy.tenants}
        everybody = Tenant("")
        self.everybody = Account(everybody, Quota(everybody, 1, clock), None)

    @property
    def of_tenants(self) -> list[Account]:
        return [*self._all.values()]

    def of(self, scope: Scope) -> Account:
        """Returns the account of a request. Raises ApiError for one whose key no tenant has."""
        if self._keys is None or scope["path"] in OPEN_PATHS:
            return self.everybody
        key = given_key(scope)
        tenant = self._keys.owner(key) if key is not None else None
        if tenant is None:
            raise unauthorized(key)
        return self._all[tenant]
