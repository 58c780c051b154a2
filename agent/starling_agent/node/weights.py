"""From `model.source` to a folder on this machine: a folder that is there, or a repository that is downloaded."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote, urlparse

import structlog
from starling_engine.errors import ModelError
from starling_engine.weights.hub import split_name

from starling_agent.contract.config import ModelSourceConfig
from starling_agent.node.download import Download
from starling_agent.node.failures import NodeFailure, fatal
from starling_agent.node.progress import Tell

ATTEMPTS = 5
FIRST_DELAY, MAX_DELAY = 1.0, 16.0
log = structlog.get_logger("starling.agent")


async def obtain(model: ModelSourceConfig, tell: Tell, on_retry: Callable[[str], None]) -> Path:
    """The folder with the weights; `on_retry` hears why a download is begun again. Raises NodeFailure."""
    match model.source.partition("://"):
        case "file", "://", _:
            return local_folder(model.source)
        case "hf", "://", name:
            return Path(await _tried(name, model, lambda plain: Download(name, model, tell, plain=plain).run(), on_retry))
    raise fatal(f"model.source: must be file:///path or hf://org/name@revision, got {model.source!r}")


async def resolve(model: ModelSourceConfig, on_retry: Callable[[str], None]) -> str:
    """The commit that a name of the hub means now; without the hub, the one that the cache has of it. Raises NodeFailure."""
    name = model.source.removeprefix("hf://")
    return await _tried(name, model, lambda plain: Download(name, model, _untold, plain=plain, only_resolve=True).run(), on_retry)


def _untold(*_: object) -> None:
    """The question for a commit moves no bytes."""


def local_folder(source: str) -> Path:
    """Raises NodeFailure when the folder is not there or cannot be a checkpoint."""
    parts = urlparse(source)
    folder = Path(unquote(parts.path))
    if parts.netloc or not folder.is_absolute():
        raise fatal(f"model.source: file:// needs an absolute path (file:///path), got {source!r}")
    try:
        if not folder.is_dir():
            raise fatal(f"model.source: {folder} is not a folder here")
        if not (folder / "config.json").is_file():
            raise fatal(f"model.source: {folder} holds no config.json; it must be a checkpoint's own folder")
    except OSError as error:
        raise fatal(f"model.source: {folder} cannot be read: {error.strerror}") from None
    return folder


async def _tried(
    name: str, model: ModelSourceConfig, attempt_one: Callable[[bool], Awaitable[str]], on_retry: Callable[[str], None]
) -> str:
    """`attempt_one` hears whether to leave out the hub's faster protocol: all attempts but the first do."""
    try:
        split_name(name)
    except ModelError:
        raise fatal(f"model.source: must be hf://org/name or hf://org/name@revision, got {model.source!r}") from None
    delay = FIRST_DELAY
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await attempt_one(attempt > 1)
        except NodeFailure as failure:
            log.warning("download failed", cause=str(failure), attempt=attempt, attempts=ATTEMPTS)
            if failure.fatal or attempt == ATTEMPTS:
                raise
            on_retry(f"{failure} (attempt {attempt} of {ATTEMPTS})")
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_DELAY)
    raise AssertionError("the last attempt returns or raises")
