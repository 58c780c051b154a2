"""A download in a process of its own. A library that hangs in a thread cannot be stopped; a process can."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from starling_agent.contract.config import ModelSourceConfig
from starling_agent.contract.report import Phase
from starling_agent.node.failures import NodeFailure, transient
from starling_agent.node.fetch_messages import Fetched, FetchFailed, FetchMessage, FetchProgress
from starling_agent.node.progress import OnProgress

START_SECONDS = 60.0
"""Time for the first message of the process, which loads a library and lists the repository first."""

log = structlog.get_logger("starling.download")


class Download:
    """Runs `node.fetch`. `plain` switches off the hub's faster protocol, which can stall for ever. `only_resolve`: no download."""

    def __init__(
        self, name: str, model: ModelSourceConfig, on_progress: OnProgress, *, plain: bool, only_resolve: bool = False
    ) -> None:
        self._name = name
        self._model = model
        self._on_progress = on_progress
        self._plain = plain
        self._flags = ("resolve",) if only_resolve else ()
        self._last: FetchProgress | None = None
        self._result: Fetched | FetchFailed | None = None
        self._last_line = "it left no message"

    async def run(self) -> str:
        """Returns the folder, or the commit. Raises NodeFailure. The process always ends with it, also on cancellation."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "starling_agent.node.fetch",
            self._name,
            self._model.cache_dir,
            *self._flags,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(),
        )
        stall = self._model.download_stall_seconds
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(max(stall, START_SECONDS)) as limit:
                on_moved = partial(_postpone, limit, loop, stall)
                await asyncio.gather(self._read_messages(process, on_moved), self._read_log(process))
        except TimeoutError:
            raise transient(f"the download of {self._name} stalled: no byte for {stall:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return self._outcome()

    def _environment(self) -> dict[str, str]:
        cache = self._model.cache_dir
        settings = {"HF_HOME": cache, "HF_HUB_CACHE": f"{cache}/hub", "HF_XET_CACHE": f"{cache}/xet"}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**os.environ, **settings, **quiet, **({"HF_HUB_DISABLE_XET": "1"} if self._plain else {})}

    def _outcome(self) -> str:
        match self._result:
            case Fetched(result):
                return result
            case FetchFailed(message, is_fatal):
                raise NodeFailure(f"model.source: {message}", fatal=is_fatal)
        raise transient(f"the download of {self._name} ended by itself: {self._last_line}")

    async def _read_messages(self, process: asyncio.subprocess.Process, on_moved: Callable[[], None]) -> None:
        assert process.stdout is not None
        decode = msgspec.json.Decoder(FetchMessage).decode
        async for line in process.stdout:
            message = decode(line)
            if isinstance(message, FetchProgress):
                self._on_step(message, on_moved)
            else:
                self._result = message

    def _on_step(self, step: FetchProgress, on_moved: Callable[[], None]) -> None:
        # While another agent downloads the same, that agent watches for a stall.
        if step != self._last or step.waiting:
            on_moved()
        self._last = step
        phase: Phase = "verifying" if step.verifying else "downloading"
        self._on_progress(phase, step.done, step.total)

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_line = text
                log.warning("hub", message=text[:500])


def _postpone(limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    limit.reschedule(loop.time() + seconds)
