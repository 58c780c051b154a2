"""Finds the folder or GGUF file of `model.source` on this machine, where that of the hub is downloaded, and its digest."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import unquote, urlparse

import structlog
from starling_engine.config import QUANTIZATION_VERSION
from starling_engine.errors import ModelError
from starling_engine.gguf.reader import is_gguf, open_gguf
from starling_engine.weights.hub import ALLOWED, FORM, split_name

from starling_agent.contract.config import ModelSourceConfig
from starling_agent.node.download import Download
from starling_agent.node.failures import NodeFailure, fatal
from starling_agent.node.progress import OnProgress

ATTEMPTS = 5
FIRST_DELAY, MAX_DELAY = 1.0, 16.0
_WEIGHTS = ".safetensors"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""
_MAX_BYTES = 64 << 20
"""The most that is read of one file; a header, or a tokenizer, is smaller."""
log = structlog.get_logger("starling.agent")


async def obtain(model: ModelSourceConfig, on_progress: OnProgress, on_retry: Callable[[str], None]) -> Path:
    """Returns where the weights are. `on_retry` is called with the cause of each new try. Raises NodeFailure."""
    match model.source.partition("://"):
        case "file", "://", _:
            return local_model(model.source)
        case "hf", "://", name:
            return Path(await _retried(name, model, lambda plain: Download(name, model, on_progress, plain=plain).run(), on_retry))
    raise fatal(f"model.source: must be file:///path or hf://{FORM}, got {model.source!r}")


async def resolve(model: ModelSourceConfig, on_retry: Callable[[str], None]) -> str:
    """Returns the commit that a name means now on the hub, or without the hub in the cache. Raises NodeFailure."""
    name = model.source.removeprefix("hf://")
    return await _retried(
        name, model, lambda plain: Download(name, model, _no_progress, plain=plain, only_resolve=True).run(), on_retry
    )


def _no_progress(*_: object) -> None:
    """Ignores progress: resolving a name downloads nothing."""


def commit_of(model: ModelSourceConfig, path: Path) -> str | None:
    """Returns the commit of what was downloaded to `path`; None for weights that come from elsewhere."""
    scheme, _, name = model.source.partition("://")
    return split_name(name).snapshot(path).name if scheme == "hf" else None


def local_model(source: str) -> Path:
    """Returns the folder or GGUF file. Raises NodeFailure when it is missing or cannot be a checkpoint."""
    parts = urlparse(source)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute():
        raise fatal(f"model.source: file:// needs an absolute path (file:///path), got {source!r}")
    try:
        if path.is_file() and is_gguf(path):
            return path
        if not path.is_dir():
            raise fatal(f"model.source: {path} is neither a folder nor a GGUF file here")
        if not (path / "config.json").is_file():
            raise fatal(f"model.source: {path} holds no config.json; it must be a checkpoint's own folder, or a GGUF file")
    except OSError as error:
        raise fatal(f"model.source: {path} cannot be read: {error.strerror}") from None
    return path


async def _retried(
    name: str, model: ModelSourceConfig, attempt_one: Callable[[bool], Awaitable[str]], on_retry: Callable[[str], None]
) -> str:
    """Calls `attempt_one` up to ATTEMPTS times; its argument is True after the first: without the hub's faster protocol."""
    try:
        split_name(name)
    except ModelError:
        raise fatal(f"model.source: must be hf://{FORM}, got {model.source!r}") from None
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


def weights_digest(model: Path, quantization: str | None = None) -> str:
    """Returns a text that differs between two checkpoints, made without reading their weights.

    It is the SHA-256, in hex, of names, sizes, headers of weights and content of all other files; and of the scheme by which they
    are quantized while they are loaded, with its version. Raises OSError, and NodeFailure for a GGUF file that cannot be served.
    """
    digest = hashlib.sha256() if quantization is None else hashlib.sha256(f"{quantization}\0{QUANTIZATION_VERSION}\0".encode())
    if is_gguf(model):
        try:
            file = open_gguf(model)
        except ModelError as error:
            raise fatal(f"model.source: {error}") from error
        for path, part in file.parts.items():
            digest.update(f"{path.name}\0{part.size}\0".encode())
        digest.update(file.header_bytes)
        return digest.hexdigest()
    for path in _files(model):
        with path.open("rb") as content:
            length = _MAX_BYTES
            if path.suffix == _WEIGHTS:
                length = min(_LENGTH_BYTES + int.from_bytes(content.read(_LENGTH_BYTES), "little"), _MAX_BYTES)
                content.seek(0)
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(content.read(length))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files that a download would bring, in the order of their names."""
    return (path for path in sorted(folder.iterdir()) if path.is_file() and any(fnmatch(path.name, each) for each in ALLOWED))
