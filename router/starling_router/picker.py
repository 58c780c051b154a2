"""Picks the backend of a request: the one with the least work before its first token.

Work is counted in prompt tokens. A backend's work is what it has to compute of this prompt, and what it has to do for others:

    work = (tokens - prefix * cached) + load * (pending + request_tokens * open) - session * tokens, if the session was last there

So a cached prefix draws requests until those that wait there would cost more than to compute the prefix elsewhere: a prefix that
everybody has does not pile all requests onto one backend. A cached token counts twice: to compute it elsewhere pushes another one
out of a cache that is full, which is then computed again. While a canary runs, work counts among backends of one revision alone.

A backend whose free KV blocks cannot hold what is not cached of the prompt is taken last: there it would wait until others end.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from types import MappingProxyType
from typing import Literal, NamedTuple

from starling_router.backend import Backend
from starling_router.revision_order import ANY_REVISION, RevisionOrder

MOST_SESSIONS = 100_000
NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """Weights of the reasons to pick a backend; 0 leaves a reason out.

    request_tokens   an open request slows a new one down as much as so many prompt tokens
    """

    prefix: float = 2.0
    load: float = 1.0
    session: float = 1.0
    request_tokens: int = 256


Reason = Literal["prefix", "session", "load"]


class Pick(NamedTuple):
    """The backend of a request. `cached` of its tokens are there already; `reason` is what moved the request there.

    `cached_by` has the tokens that backends have, by their numbers.
    """

    backend: Backend
    cached: int
    reason: Reason
    cached_by: Mapping[int, int]


class Picker:
    """Picks backends, and remembers where sessions went."""

    def __init__(self, policy: RouterPolicy) -> None:
        self._policy = policy
        self._sessions: OrderedDict[int, str] = OrderedDict()
        self._picks = 0

    def pick(
        self,
        ready: Sequence[Backend],
        tokens: int,
        cached: Mapping[int, int],
        session: str | None = None,
        tried: Collection[str] = (),
        order: RevisionOrder = ANY_REVISION,
        begun: Mapping[int, int] = NOTHING,
    ) -> Pick | None:
        """Returns the pick for a prompt of so many tokens; None where all that are ready were `tried`.

        `cached` has the tokens that backends have of it, by their numbers. Of equal ones that is picked which has more `begun`.
        """
        candidates = [backend for backend in ready if backend.name not in tried]
        if not candidates:
            return None
        last = self._last_of(session)
        best = min(candidates, key=self._work(tokens, cached, last, order, begun))
        self._picks += 1
        best.picked = self._picks
        self._note(session, best)
        return Pick(best, cached.get(best.number, 0), self._reason(best, cached, last), cached)

    def fallbacks(
        self,
        pick: Pick,
        ready: Sequence[Backend],
        tokens: int,
        most: int,
        order: RevisionOrder = ANY_REVISION,
    ) -> list[Backend]:
        """Returns at most so many of the other backends in the order in which they would be picked, without picking them."""
        others = (backend for backend in ready if backend is not pick.backend)
        return nsmallest(most, others, key=self._work(tokens, pick.cached_by, None, order))

    def _work(
        self,
        tokens: int,
        cached: Mapping[int, int],
        last: str | None,
        order: RevisionOrder,
        begun: Mapping[int, int] = NOTHING,
    ) -> Callable[[Backend], tuple[int, bool, float, int, int]]:
        """Returns what orders backends for a prompt: revision, lack of KV blocks, work, what was begun there, their last pick."""
        policy, pull = self._policy, self._policy.session * tokens

        def work(backend: Backend) -> tuple[int, bool, float, int, int]:
            there, free = cached.get(backend.number, 0), backend.kv_free
            is_short = free is not None and tokens - there > free and policy.load > 0
            own = tokens - policy.prefix * there
            others = policy.load * (backend.pending + policy.request_tokens * (backend.open + backend.others))
            pulled = pull if backend.name == last else 0.0
            return order.rank(backend), is_short, own + others - pulled, -begun.get(backend.number, 0), backend.picked

        return work

    def _reason(self, best: Backend, cached: Mapping[int, int], last: str | None) -> Reason:
        if self._policy.session and best.name == last:
            return "session"
        return "prefix" if self._policy.prefix and cached.get(best.number, 0) else "load"

    def _last_of(self, session: str | None) -> str | None:
        return None if session is None else self._sessions.get(hash(session))

    def _note(self, session: str | None, backend: Backend) -> None:
        if session is None:
            return
        key = hash(session)  # clients choose it, and may choose a long one
        self._sessions[key] = backend.name
        self._sessions.move_to_end(key)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
