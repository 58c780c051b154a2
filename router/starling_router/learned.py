"""Learns from backends how they make tokens of prompts, so that a router needs no files of their model."""

import asyncio
import zlib
from collections.abc import Mapping

import structlog
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.backend import BackendState
from starling_agent.server.process_memory import collect_rarely
from starling_agent.settings import ServerSettings
from starling_engine.errors import StarlingError

from starling_router.backend import Backend
from starling_router.exact import ExactPrompts
from starling_router.questions import Questions
from starling_router.upstream import BackendUnreachable

FETCH_SECONDS = 30.0
MOST_COMPRESSED, MOST_PLAIN = 64 << 20, 512 << 20
"""The largest tokenizers have some 40 MB."""
log = structlog.get_logger("starling.router")


class LearnedPrompts:
    """Keeps what backends have told, by the digests in their states. Belongs to the event loop that it is made in.

    It asks nobody where prompts are `given`.
    """

    def __init__(self, questions: Questions, settings: ServerSettings, given: ExactPrompts | None) -> None:
        self._questions, self._settings, self._given = questions, settings, given
        if given is not None:
            given.open()
        self._known: dict[str, ExactPrompts | None] = {}
        """Has None for what is on its way, or cannot be used."""
        self._fetching: dict[str, asyncio.Task[None]] = {}
        """The last fetch of each digest that is known."""

    def get(self, digest: str) -> ExactPrompts | None:
        return self._given or self._known.get(digest)

    def note(self, backend: Backend, states: Mapping[str, BackendState]) -> None:
        """Fetches what a backend has if it is new, and forgets what no backend has any more."""
        if self._given is not None:
            return
        digest = states[backend.name].prompting
        if self._known.keys() == ({digest} if digest else set()):
            return  # the usual case, twice a second for each backend: all have the same, or none has any
        for gone in self._known.keys() - {state.prompting for state in states.values()}:
            self._close(gone)
        if digest and digest not in self._known:
            self._known[digest] = None
            self._fetching[digest] = asyncio.create_task(self._fetch(backend, digest))

    async def close(self) -> None:
        tasks = [*self._fetching.values()]
        for digest in [*self._known]:
            self._close(digest)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._given is not None:
            self._given.close()

    def _close(self, digest: str) -> None:
        """Forgets a digest. One that comes back is fetched anew, and once: what was on its way is not waited for."""
        self._fetching.pop(digest).cancel()
        if (exact := self._known.pop(digest)) is not None:
            exact.close()

    async def _fetch(self, backend: Backend, digest: str) -> None:
        try:
            data = await self._questions.ask(backend, "/backend/prompting", FETCH_SECONDS, MOST_COMPRESSED)
            exact = await asyncio.to_thread(lambda: ExactPrompts.served(_plain(data), self._settings))
        except BackendUnreachable as error:
            del self._known[digest], self._fetching[digest]  # the next state that has it has it tried again
            log.warning("a tokenizer could not be fetched", backend=backend.name, cause=str(error))
            return
        except (BadAnswer, StarlingError) as error:
            log.warning("prompts go by their text: a tokenizer cannot be used", backend=backend.name, cause=str(error))
            return
        exact.open()
        self._known[digest] = exact
        collect_rarely()  # a tokenizer has hundreds of thousands of objects, which would be looked at again and again
        log.info("prompts go by their blocks", backend=backend.name, digest=digest[:12])


def _plain(data: bytes) -> bytes:
    """Undoes gzip. Raises BadAnswer for what is none, or too long."""
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = reader.decompress(data, MOST_PLAIN)
    except zlib.error as error:
        raise BadAnswer(f"its prompting cannot be read: {error}") from None
    if not reader.eof:
        raise BadAnswer(f"its prompting is cut, or longer than {MOST_PLAIN} bytes")
    return plain
