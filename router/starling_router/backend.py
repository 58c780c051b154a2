"""The agents' endpoints that a router may pick, and what it knows of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Backend:
    """An agent's endpoint, as a router sees it. Another one may take its name and its number when it has gone.

    name       of the pod, or the URL where it is given by that
    pod        name of its pod, as it says itself
    revision   of its pod, as it says itself
    number     bit that stands for it in masks; those of backends that went are used again
    ready      it answered its probe, and no request since failed to reach it
    ends       it says itself that it takes no requests, as one does that drains
    pending    prompt tokens, without those cached, of open requests that have no token yet
    leading    those of them that are a tenant's only request
    open       requests that this router has open there
    others     requests that are open there besides, when it was last asked
    limit      open requests at which it has room for no other one, as far as it says; None: it does not say
    step       tokens that it computes in one step; 0: it does not say
    kv_free    tokens for which it had free KV blocks when it was last asked; None: it does not say, or a request has ended since
    full       it refused a request, and of those that may wait only small ones are sent there now
    fits       prompt tokens that it may have room for although it is full
    growing    it has refused none of those that waited since it became ready, or was asked again
    tries      requests that waited and may be sent there now
    """

    name: str
    url: str
    number: int
    pod: str = ""
    revision: str = ""
    ready: bool = False
    ends: bool = False
    pending: int = 0
    leading: int = 0
    open: int = 0
    others: int = 0
    limit: int | None = None
    step: int = 0
    kv_free: int | None = None
    full: bool = False
    fits: int = 0
    growing: bool = False
    tries: int = 0
    picked: int = 0
    """Pick at which it was chosen last; of equal ones the router takes the one that has waited longest."""

    @property
    def is_idle(self) -> bool:
        return not self.open and not self.others

    @contextmanager
    def carrying(self, tokens: int, *, leads: bool = False) -> Iterator["Carried"]:
        """Counts a request with so many prompt tokens to compute, from its pick to its end; one that `leads` as such."""
        carried = Carried(self, tokens, leads)
        self.open += 1
        self.pending += tokens
        self.leading += leads
        try:
            yield carried
        finally:
            carried.began()
            self.open -= 1
            self.kv_free = None  # the next turn of a long chat is not to leave the server whose blocks its last one held


@dataclass(slots=True)
class Carried:
    """A request that a backend has."""

    backend: Backend
    tokens: int
    leads: bool = False

    def began(self) -> None:
        """Notes the first token: the prompt is no work any more."""
        self.backend.pending -= self.tokens
        self.backend.leading -= self.leads
        self.tokens, self.leads = 0, False


@dataclass
class Backends:
    """All backends of a service. A number is free again when its backend has gone."""

    all: list[Backend] = field(default_factory=list)

    @property
    def ready(self) -> list[Backend]:
        return [backend for backend in self.all if backend.ready]

    def set(self, wanted: Sequence[tuple[str, str]]) -> tuple[list[Backend], list[Backend]]:
        """Sets names and URLs. Returns the backends that came and those that went; others keep what is known of them."""
        known = {(backend.name, backend.url): backend for backend in self.all}
        stay = known.keys() & set(wanted)
        gone = [backend for key, backend in known.items() if key not in stay]
        kept = [known[key] for key in wanted if key in known]
        taken = {backend.number for backend in kept}
        free = (number for number in range(len(wanted)) if number not in taken)
        came = [Backend(name, url, next(free)) for name, url in wanted if (name, url) not in known]
        self.all = [*kept, *came]
        return came, gone
