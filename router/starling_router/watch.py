"""Asks every backend for its state, and follows what those have cached that tell it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import structlog
from starling_agent.client.bounded import BadAnswer, parse
from starling_agent.contract.backend import BackendState

from starling_router.backend import Backend, Backends
from starling_router.events import CachedBlocks, FollowedBackend
from starling_router.index import GuessedIndex
from starling_router.learned import LearnedPrompts
from starling_router.questions import BackendLate, Questions
from starling_router.upstream import BackendUnreachable

POLL_SECONDS = 0.5
ANSWER_SECONDS = 2.0
MOST_LATE = 1
"""Late answers in a row of a backend that stays ready: it may only be busy."""
log = structlog.get_logger("starling.router")


@dataclass(slots=True)
class _Watched:
    """A backend that is watched.

    asked   set once it has been asked for its state, whatever came of it
    late    answers in a row that did not come in time
    unready why it is not ready, as it was logged last; empty: it is
    cause   why it is not known what it has cached, as it was logged last; empty: that it is known was logged
    """

    backend: Backend
    cache: FollowedBackend
    task: "asyncio.Task[None] | None" = None
    following: "asyncio.Task[None] | None" = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    late: int = 0
    unready: str = ""
    cause: str = "it was not asked yet"


class BackendWatch:
    """Keeps `backends` up to date while it is open. `states` has the last state of each, by name.

    `on_ready` is called with each backend that becomes ready, `on_room` with each that says how many more requests it would run.
    """

    def __init__(
        self,
        backends: Backends,
        questions: Questions,
        learned: LearnedPrompts,
        cached: CachedBlocks,
        guessed: GuessedIndex,
        on_ready: Callable[[Backend], None],
        on_room: Callable[[Backend, int], None] = lambda _, __: None,
    ) -> None:
        self._on_ready, self._on_room = on_ready, on_room
        self._backends, self._questions, self._learned = backends, questions, learned
        self._cached, self._guessed = cached, guessed
        self._watched: dict[str, _Watched] = {}
        self.states: dict[str, BackendState] = {}

    def set(self, wanted: Mapping[str, str]) -> None:
        """Sets the URLs of the backends by name. What is known of those that stay is kept."""
        came, gone = self._backends.set([*wanted.items()])
        for backend in gone:
            watched = self._watched.pop(backend.name)
            assert watched.task is not None
            watched.task.cancel()
            watched.asked.set()
            self.states.pop(backend.name, None)
            self._guessed.forget(backend.number)
        for backend in came:
            watched = _Watched(backend, FollowedBackend(backend.number, self._cached))
            watched.task = asyncio.create_task(self._watch(watched))
            self._watched[backend.name] = watched

    async def first_answers(self) -> None:
        """Waits until each backend that there is now has been asked for its state, whatever came of it."""
        await asyncio.gather(*(watched.asked.wait() for watched in self._watched.values()))

    def is_ready(self, name: str) -> bool:
        return name in self._watched and self._watched[name].backend.ready

    def followed(self) -> Iterator[BackendState]:
        """Yields the states of those backends of which it is known what they have cached."""
        return (self.states[name] for name, watched in self._watched.items() if watched.cache.is_known and name in self.states)

    async def close(self) -> None:
        tasks = [watched.task for watched in self._watched.values() if watched.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, watched: _Watched) -> None:
        async with asyncio.TaskGroup() as tasks:  # what is followed ends with the watch
            while True:
                state = await self._ask(watched)
                watched.asked.set()
                if state is not None and self._may_follow(watched, state):
                    watched.following = tasks.create_task(self._follow(watched))
                if watched.cache.is_known and watched.cause:
                    watched.cause = ""
                    log.info("what a backend has cached is known", backend=watched.backend.name)
                await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, watched: _Watched) -> BackendState | None:
        """Returns the backend's state, and None where it gives none: then it is not ready, unless it may only be late."""
        backend = watched.backend
        before = backend.open
        try:
            if not backend.ready:  # it is new, or was away: its address may be another service's by now
                await self._questions.check_ours(backend, ANSWER_SECONDS)
            state = parse(BackendState, await self._questions.ask(backend, "/backend", ANSWER_SECONDS), "state")
        except (BackendUnreachable, BadAnswer) as error:
            watched.late = watched.late + 1 if isinstance(error, BackendLate) else 0
            if not 0 < watched.late <= MOST_LATE:
                self._set_ready(watched, False, str(error))
            return None
        watched.late = 0
        self.states[backend.name], backend.pod, backend.revision = state, state.pod, state.revision
        backend.others = max(0, state.open - max(before, backend.open))
        self._learned.note(backend, self.states)
        backend.step, backend.kv_free, backend.ends = state.step_tokens, state.kv_free, not state.ready
        self._set_ready(watched, state.ready, "it says so")
        self._set_room(backend, state, before)
        return state

    def _set_room(self, backend: Backend, state: BackendState, before: int) -> None:
        """Notes how much room there is: so many as it said, less those that have been sent since it was asked."""
        backend.limit = None if state.room is None else state.open + state.room
        if state.room is not None and state.ready:
            self._on_room(backend, state.room - max(0, backend.open - before))

    def _set_ready(self, watched: _Watched, ready: bool, cause: str) -> None:
        """Logs changes, and each new cause why it is not ready: the first one says why a server is never picked."""
        backend, unready = watched.backend, "" if ready else cause
        changed, backend.ready = backend.ready != ready, ready
        if changed or unready != watched.unready:
            log.info("backend ready" if ready else "backend not ready", backend=backend.name, cause=cause)
        watched.unready = unready
        if changed and ready:
            self._on_ready(backend)

    # ---- what it has cached ----

    def _may_follow(self, watched: _Watched, state: BackendState) -> bool:
        is_new = watched.following is None or watched.following.done()
        return is_new and state.shows_cache and state.ready and self._questions.shows_token

    async def _follow(self, watched: _Watched) -> None:
        """Follows what a backend has cached until it ends that, or cannot be followed. Then it is asked anew."""
        backend, cause = watched.backend, "it ended its answer"
        try:
            async with self._questions.stream(backend, "/backend/cache") as chunks:
                await watched.cache.follow(chunks)
        except (BackendUnreachable, BadAnswer) as error:
            cause = str(error)
        except Exception:  # nobody awaits the task: the log tells, and the backend is asked anew
            log.exception("what a backend has cached cannot be followed", backend=backend.name)
        if cause != watched.cause:
            watched.cause = cause
            log.info("what a backend has cached is not known now", backend=backend.name, cause=cause)
