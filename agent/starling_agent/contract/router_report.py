"""Messages between the operator and a router: `POST /router/report?after=N&wait=S` with the routers' token in its header.

The body is the operator's notice, the answer the router's report. A long poll as that of agents (see `report`): it is answered at
once if the version is above `after` or of another incarnation than `&incarnation=ID`, else with the next, or after `wait` seconds.
"""

from typing import Literal

from pydantic import Field

from starling_agent.contract.config import ContractModel

FIRST_TOKEN_SECONDS = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
"""Upper bounds of the buckets in which times to a first token are counted; those above the last are in none of them."""


class CanaryNotice(ContractModel):
    """Says how requests are shared by two revisions of one service.

    stable      the revision, as agents say theirs, that serves
    canary      the one that is tried
    attempt     id of this try of it: the same pair may be tried again, and counts begin anew
    weight      percent of requests that go to the canary's groups while one is ready
    sticky_by   what keeps a client with one revision: the tenant or API key, the session, or nothing
    compare     gate: tokens of shadows, with errors and times; slo: errors and times alone
    exact       of tokens: any difference counts, as in float32; else only one that is no near tie of the stable revision
    """

    stable: str
    canary: str
    attempt: str = ""
    weight: int = Field(ge=0, le=100)
    sticky_by: Literal["key", "session", "none"] = "session"
    compare: Literal["tokens", "slo"] = "slo"
    exact: bool = False


class ServiceNotice(ContractModel):
    """The state of the service as the operator knows it, for clients whose requests no group takes.

    models        names that requests may give as `model`; none: they are not known
    phase         reason of the condition Ready, a word for machines; empty while a group serves
    message       the condition's message: which pod, what it does, why it waits
    eta_seconds   about so long until a group serves; None: unknown
    canary        None: no canary runs, and requests go to groups of any revision
    """

    models: list[str] = Field(default_factory=list)
    phase: str = ""
    message: str = ""
    eta_seconds: float | None = None
    canary: CanaryNotice | None = None


class RevisionCounts(ContractModel):
    """Requests that one router has sent to one revision.

    placed           that were to go there by the weight, whichever one answered, each once; shadows are none
    requests         that it answered, or under which its server went away
    errors           those with a status of 5xx, under which a server went away whoever went on, or whose answer was cut for good
    first_tokens     streams whose first piece came within each bound of FIRST_TOKEN_SECONDS after they were sent there
    first_tokens_all streams whose first piece came at all; answers that are no streams are not among them
    """

    placed: int = Field(default=0, ge=0)
    requests: int = Field(default=0, ge=0)
    errors: int = Field(default=0, ge=0)
    first_tokens: list[int] = Field(default_factory=lambda: [0] * len(FIRST_TOKEN_SECONDS))
    first_tokens_all: int = Field(default=0, ge=0)


class CanaryReport(ContractModel):
    """Counts of what one router has seen of a canary since it was told of it; a change of its weight or gate begins nothing anew.

    canary      the revision
    attempt     that of the notice whose counts these are
    stable      counts of the revision that serves
    tried       counts of the canary, shadows among its requests and those that failed there among its errors
    compared    shadows whose tokens were compared
    differing   those that had other tokens
    difference  one of them in a sentence, with positions and ids of tokens and no text; empty: there is none
    """

    canary: str
    attempt: str = ""
    stable: RevisionCounts = Field(default_factory=RevisionCounts)
    tried: RevisionCounts = Field(default_factory=RevisionCounts)
    compared: int = Field(default=0, ge=0)
    differing: int = Field(default=0, ge=0)
    difference: str = ""


class RouterReport(ContractModel):
    """Counts of what clients ask of one router that needs a group: no probes, lists, stored responses or proofs of agents.

    version        grows when the router becomes busy, and when it is quiet again: no request has come for a moment; while a canary
                   runs also with what it is told of it, at once with its first errors and difference, else every 5 seconds at most
    incarnation    id of this process
    open           requests that are open, those that wait included
    held           those that wait
    quiet_seconds  since the last request ended, or the router began; None: it is busy
    canary         None: it has been told of no canary
    """

    version: int = Field(ge=0)
    incarnation: str
    open: int = Field(ge=0)
    held: int = Field(ge=0)
    quiet_seconds: float | None = Field(default=None, ge=0)
    canary: CanaryReport | None = None
