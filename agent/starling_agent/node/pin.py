"""One commit for all ranks of a revision: a name of the hub may move between two of them.

Each agent says in its report which commit the name means now. The operator writes the first one down, and every agent loads that.
"""

import asyncio
import re
from pathlib import Path

import structlog

from starling_agent.contract.config import ModelSourceConfig, is_pinned
from starling_agent.node.weights import resolve
from starling_agent.report_state import ReportState

LOOK_SECONDS = 0.5
COMMIT = re.compile(r"[0-9a-f]{40}")
log = structlog.get_logger("starling.agent")


class Pin:
    """The commit that the operator chose: told on the admin endpoint, or in a file that it mounts (None: there is no such file)."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._told: str | None = None
        self._news = asyncio.Event()

    @property
    def is_awaited(self) -> bool:
        """Somebody pins here. An agent that was started by hand, or by an older operator, goes on alone."""
        return self._file is not None

    def tell(self, commit: str) -> None:
        """The first one stays; what is no commit is ignored."""
        if self._told is None and COMMIT.fullmatch(commit):
            self._told = commit
            self._news.set()

    async def wait(self) -> str:
        """Until there is one."""
        while self.known is None:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                continue
        return self.known

    @property
    def known(self) -> str | None:
        """The commit is whole or not there: a file that is being written holds none yet."""
        if self._told is None and self._file is not None and self._file.is_file():
            self.tell(self._file.read_text(errors="replace").strip())
        return self._told


async def pinned(model: ModelSourceConfig, pin: Pin, state: ReportState) -> ModelSourceConfig:
    """The model at the commit that all ranks load; itself where nothing can move. Raises NodeFailure."""
    if not model.source.startswith("hf://") or is_pinned(model.source) or not pin.is_awaited:
        return model
    if pin.known is None:
        commit = await resolve(model, lambda cause: state.update(last_error=cause))
        state.update(commit=commit)
        log.info("waits for the operator to pin the commit", source=model.source, commit=commit)
    chosen = await pin.wait()
    state.update(commit=chosen)
    return model.model_copy(update={"source": f"{model.source.partition('@')[0]}@{chosen}"})
