"""Shadows: some requests are asked again of both revisions of a canary, and the tokens of their answers are compared.

Clients have no part in it. Their answers have ended when a shadow begins, which is no request of theirs: it costs no quota, stores
nothing, and goes out only where nobody waits. A canary with the weight 0 is compared, too, before it has any request.
"""

import asyncio
import random
import secrets
from dataclasses import dataclass

import structlog
from starlette.types import Scope
from starling_agent.client.bounded import BadAnswer, read_all
from starling_agent.contract.router import PRIORITY, SHADOW
from starling_agent.contract.router_report import CanaryNotice
from starling_agent.file_token import FileToken
from starling_agent.http.errors import ApiError

from starling_router.accounts import Account
from starling_router.backend import Backend, Backends
from starling_router.canary import CanaryRun, CanaryTraffic, PlacedRequest
from starling_router.hold import ELSEWHERE, Hold
from starling_router.hold_queue import has_room
from starling_router.shadow_tokens import ShadowAnswer, difference, read_shadow, shadow_body
from starling_router.tenants import MOST_PRIORITY
from starling_router.upstream import BackendUnreachable, Upstream, forwarded_headers

SHADOW_SECONDS = 60.0
"""Time that a revision has for an answer of a few tokens."""
MOST_BODY_BYTES = 256 << 10
"""Requests with longer bodies have no shadows: to read one must not keep the others waiting."""
MOST_ANSWER_BYTES = 4 << 20
_LOWEST = str(-MOST_PRIORITY - 1).encode()
log = structlog.get_logger("starling.router")


@dataclass(frozen=True, slots=True)
class ShadowPolicy:
    """Bounds of what shadows cost: the `share` of requests that have one, and how many there are at a time."""

    share: float = 0.1
    at_once: int = 2


SOME_SHADOWS = ShadowPolicy()


@dataclass(frozen=True, slots=True)
class ShadowFailure:
    """Says why a revision gave no tokens where it should have."""

    why: str


class Shadows:
    """Belongs to the event loop that it is made in."""

    def __init__(
        self,
        policy: ShadowPolicy,
        canary: CanaryTraffic,
        backends: Backends,
        upstream: Upstream,
        hold: Hold,
        token: FileToken | None,
    ) -> None:
        self._policy, self._canary, self._backends = policy, canary, backends
        self._upstream, self._hold, self._token = upstream, hold, token
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, scope: Scope, body: bytes, account: Account, placed: PlacedRequest) -> None:
        """Begins the shadow of a request whose answer has ended, if it is to have one."""
        notice, run = self._canary.notice, self._canary.run
        if notice is None or run is None or notice.compare != "tokens" or not placed.has_answer or len(body) > MOST_BODY_BYTES:
            return
        if len(self._tasks) >= self._policy.at_once or random.random() >= self._policy.share:
            return
        pair = self._free(notice.stable), self._free(notice.canary)
        question = shadow_body(scope["path"], body, tops=not notice.exact)
        if pair[0] is None or pair[1] is None or question is None:
            return
        task = asyncio.create_task(self._compare(_Question(scope, question, account), notice, run, pair[0], pair[1]))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _free(self, revision: str) -> Backend | None:
        """Returns the backend of a revision with the fewest open requests, unless somebody waits for room."""
        if len(self._hold.queue):
            return None
        there = (backend for backend in self._backends.ready if backend.revision == revision and self._has_room(backend))
        return min(there, key=lambda backend: backend.open + backend.others, default=None)

    def _has_room(self, backend: Backend) -> bool:
        return not backend.full and has_room(backend, self._hold.policy.steps)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a shadow could not be compared", exc_info=error)

    async def _compare(self, question: "_Question", notice: CanaryNotice, run: CanaryRun, stable: Backend, canary: Backend) -> None:
        """Asks both revisions at once, and where they differ the stable one again.

        What that has no tokens for, or not the same ones twice, says nothing of the canary.
        """
        async with asyncio.TaskGroup() as asking:
            tasks = [asking.create_task(self._ask(question, backend)) for backend in (stable, canary)]
        right, tried = (task.result() for task in tasks)
        if not isinstance(right, ShadowAnswer) or tried is None:
            return
        if isinstance(tried, ShadowFailure):
            log.warning("a canary fails a shadow", backend=canary.name, cause=tried.why)
            run.request(notice.canary, failed=True)
            return
        found = difference(right, tried, exact=notice.exact)
        again = await self._ask(question, stable) if found else right
        run.request(notice.canary)
        if not isinstance(again, ShadowAnswer) or difference(right, again, exact=notice.exact):
            log.info("a shadow counts for nothing: the stable revision does not repeat its answer", backend=stable.name)
            return
        if found:
            log.warning("a canary answers other tokens", backend=canary.name, difference=found)
        run.compared(found)

    async def _ask(self, question: "_Question", backend: Backend) -> ShadowAnswer | ShadowFailure | None:
        """Returns the tokens that a backend answers; None where it has no room or is on its way out."""
        headers = question.account.backend_headers(self._token)
        headers |= {PRIORITY.encode(): _LOWEST, SHADOW.encode(): b"yes", b"content-type": b"application/json"}
        headers[b"x-request-id"] = f"shadow-{secrets.token_hex(8)}".encode()
        path = question.scope["path"]
        try:
            with backend.carrying(0):
                async with (
                    asyncio.timeout(SHADOW_SECONDS),
                    self._upstream.send(
                        "POST", backend.url + path, forwarded_headers(question.scope, headers), question.body
                    ) as answer,
                ):
                    data = await read_all(answer.chunks, MOST_ANSWER_BYTES)
            if answer.status in ELSEWHERE:
                return None
            self._hold.ended(backend)
            return read_shadow(path, data) if answer.status == 200 else ShadowFailure(f"it answers {answer.status}")
        except BackendUnreachable as error:
            return ShadowFailure(f"it went away ({error})") if error.had_it else None
        except TimeoutError:
            return ShadowFailure(f"no answer within {SHADOW_SECONDS:g} s")
        except (BadAnswer, ValueError) as error:
            return ShadowFailure(f"its answer cannot be read: {error}"[:300])
        except ApiError:  # a header that cannot be sent
            return None


@dataclass(frozen=True, slots=True)
class _Question:
    """The scope of a client's request, and what a shadow asks in its place."""

    scope: Scope
    body: bytes
    account: Account
