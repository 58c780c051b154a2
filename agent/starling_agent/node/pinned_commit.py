"""One commit for all pods of a revision, although a branch of the hub may move between the starts of two pods.

Each agent reports the commit that the name means now. The operator stores the first one, and every agent loads that.
"""

import asyncio
import re
from pathlib import Path

import structlog

from starling_agent.contract.config import ModelSourceConfig, is_pinned
from starling_agent.node.weights import resolve
from starling_agent.report_state import ReportState

CHECK_SECONDS = 0.5
COMMIT = re.compile(r"[0-9a-f]{40}")
log = structlog.get_logger("starling.agent")


class PinnedCommit:
    """The commit that the operator chose: sent to the admin endpoint, or in a file that it mounts (None: no such file)."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._commit: str | None = None
        self._chosen = asyncio.Event()

    @property
    def is_awaited(self) -> bool:
        """True if an operator pins here. An agent that was started by hand, or by an older operator, does not wait."""
        return self._file is not None

    def choose(self, commit: str) -> None:
        """Keeps the first commit that comes; other text is ignored."""
        if self._commit is None and COMMIT.fullmatch(commit):
            self._commit = commit
            self._chosen.set()

    async def wait(self) -> str:
        """Waits for the commit."""
        while self.known is None:
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._chosen.wait()
            except TimeoutError:
                continue
        return self.known

    @property
    def known(self) -> str | None:
        """The commit, or None; a file that is only partly written counts as none."""
        if self._commit is None and self._file is not None and self._file.is_file():
            self.choose(self._file.read_text(errors="replace").strip())
        return self._commit


async def pinned(model: ModelSourceConfig, choice: PinnedCommit, state: ReportState) -> ModelSourceConfig:
    """Returns the model at the pinned commit, or unchanged where its source cannot move. Raises NodeFailure."""
    if not model.source.startswith("hf://") or is_pinned(model.source) or not choice.is_awaited:
        return model
    if choice.known is None:
        commit = await resolve(model, lambda cause: state.update(last_error=cause))
        state.update(commit=commit)
        log.info("waits for the operator to pin the commit", source=model.source, commit=commit)
    chosen = await choice.wait()
    state.update(commit=chosen)
    return model.model_copy(update={"source": f"{model.source.partition('@')[0]}@{chosen}"})
