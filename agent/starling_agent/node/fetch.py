"""`python -m starling_agent.node.fetch NAME CACHE`: downloads one repository into the cache, once a machine, and verifies it.

With the word `resolve` behind, it only tells which commit the name means.
Another process that wants the same waits for the lock and finds it done. Ends when its standard input does: the parent is gone.
"""

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec
from starling_engine.errors import ModelError
from starling_engine.weights.hub import resolve_commit, resolve_model, split_name

from starling_agent.node.failures import NodeFailure, fatal, passing
from starling_agent.node.fetch_messages import Fetched, FetchFailed, FetchMessage, FetchProgress
from starling_agent.node.snapshot import RemoteFile, bytes_here, fingerprint, list_files, verify

LOOK_SECONDS = 0.5
LOCK_SECONDS = 0.2


def fetch(name: str, cache: Path) -> Path:
    """The verified snapshot's folder. Raises NodeFailure or ModelError."""
    repo, revision = split_name(name)
    home = cache / "hub" / f"models--{repo.replace('/', '--')}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / ".starling.lock").open("a")
    except OSError as error:
        raise fatal(f"model.cache_dir: {cache} cannot be written: {error}") from error
    with lock:
        _take(lock)
        try:
            return _download(name, repo, revision, home)
        except OSError as error:
            raise passing(f"{name}: {error}") from error


def _download(name: str, repo: str, revision: str | None, home: Path) -> Path:
    with _watched(home / "blobs", _listing(repo, revision)):
        folder = resolve_model(name)
    verified = home / ".starling-verified"
    marker = verified / folder.name
    if marker.exists() and marker.read_text() == fingerprint(folder):
        return folder
    # By commit, and asked for anew: the branch may have moved since it was listed.
    if files := _listing(repo, folder.name):
        verify(folder, files, _verify_steps(sum(file.size for file in files)))
        verified.mkdir(exist_ok=True)
        marker.write_text(fingerprint(folder))
    return folder


def resolve(name: str, cache: Path) -> str:
    """The commit that the name means on the hub, or else in the cache, which keeps it where the hub's own client does.

    Raises ModelError, and what the hub's client raises when it says no.
    """
    repo, revision = split_name(name)
    known = cache / "hub" / f"models--{repo.replace('/', '--')}" / "refs" / (revision or "main")
    try:
        commit = resolve_commit(repo, revision)
    except ModelError as error:
        if _is_final(error) or not known.is_file():
            raise
        return known.read_text().strip()
    # The download asks for the commit, and so does not write this itself; without it the cache is of no use to a new revision.
    with contextlib.suppress(OSError):
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(commit)
    return commit


def _listing(repo: str, revision: str | None) -> list[RemoteFile]:
    """Empty when the hub does not answer: the cache may hold all, and if not, the download itself says what is wrong."""
    try:
        return list_files(repo, revision)
    except Exception as error:  # noqa: BLE001 - the hub's client lets errors of several HTTP libraries through
        print(f"the hub's list of files is not to be had: {error}", file=sys.stderr)
        return []


def _take(lock: TextIO) -> None:
    """Waits for it, and says so meanwhile. It is free again when the file is closed, or its holder dead."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(FetchProgress(waiting=True))
            time.sleep(LOCK_SECONDS)
        else:
            return


@contextlib.contextmanager
def _watched(blobs: Path, files: list[RemoteFile]) -> Iterator[None]:
    """Tells meanwhile how many bytes are here."""
    total = sum(file.size for file in files)
    done = threading.Event()

    def look() -> None:
        while True:
            say(FetchProgress(bytes_here(blobs, files), total))
            if done.wait(LOOK_SECONDS):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _verify_steps(total: int) -> Callable[[int], None]:
    """A step for the first bytes, the last ones, and every LOOK_SECONDS."""
    told = -LOOK_SECONDS

    def tell(read: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= LOOK_SECONDS or read == total:
            told = now
            say(FetchProgress(read, total, verifying=True))

    return tell


def say(message: FetchMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        asked = resolve if sys.argv[3:] == ["resolve"] else fetch
        say(Fetched(str(asked(sys.argv[1], Path(sys.argv[2])))))
    except NodeFailure as failure:
        say(FetchFailed(str(failure), failure.fatal))
    except ModelError as error:
        say(FetchFailed(str(error), _is_final(error)))
    # Not by return: a thread of the hub's client that hangs would keep the process.
    os._exit(0)


def _is_final(error: ModelError) -> bool:
    """Whether the hub itself said no; everything else may be the network's fault."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError)


if __name__ == "__main__":
    main()
