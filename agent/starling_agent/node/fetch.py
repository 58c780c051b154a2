"""`python -m starling_agent.node.fetch NAME CACHE`: downloads one repository into the cache, once a machine, and verifies it.

With `resolve` as last argument it only prints the commit that the name means.
Another process that wants the same repository waits for the lock. Ends when its standard input does: the parent is gone.
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
from starling_engine.gguf.reader import parts_of
from starling_engine.weights.hub import HubName, resolve_commit, resolve_model, split_name

from starling_agent.node.failures import NodeFailure, fatal, transient
from starling_agent.node.fetch_messages import Fetched, FetchFailed, FetchMessage, FetchProgress
from starling_agent.node.snapshot import RemoteFile, bytes_in_cache, fingerprint, list_files, verify

REPORT_SECONDS = 0.5
LOCK_SECONDS = 0.2


def fetch(name: str, cache: Path) -> Path:
    """Returns the folder of the verified snapshot, or a GGUF file in it. Raises NodeFailure or ModelError."""
    wanted = split_name(name)
    home = cache / "hub" / f"models--{wanted.repo.replace('/', '--')}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / ".starling.lock").open("a")
    except OSError as error:
        raise fatal(f"model.cache_dir: {cache} cannot be written: {error}") from error
    with lock:
        _acquire(lock)
        try:
            return _download(name, wanted, home)
        except OSError as error:
            raise transient(f"{name}: {error}") from error


def _download(name: str, wanted: HubName, home: Path) -> Path:
    with _watched(home / "blobs", _listing(wanted)):
        model = resolve_model(name)
    folder = wanted.snapshot(model)
    verified = home / ".starling-verified"
    marker = verified / "-".join([folder.name, *Path(wanted.file or "").parts])
    if marker.exists() and marker.read_text() == _fingerprint(model):
        return model
    # Listed again, by commit: the branch may have moved meanwhile.
    if files := _listing(wanted._replace(revision=folder.name)):
        verify(folder, files, _verify_progress(sum(file.size for file in files)))
        verified.mkdir(exist_ok=True)
        marker.write_text(_fingerprint(model))
    return model


def _fingerprint(model: Path) -> str:
    return fingerprint(model.iterdir() if model.is_dir() else parts_of(model))


def resolve(name: str, cache: Path) -> str:
    """Returns the commit that the name means on the hub, or without the hub in the cache.

    The cache stores it where the hub's own client does. Raises ModelError, and errors of the hub's client when it refuses.
    """
    repo, revision, _ = split_name(name)
    known = cache / "hub" / f"models--{repo.replace('/', '--')}" / "refs" / (revision or "main")
    try:
        commit = resolve_commit(repo, revision)
    except ModelError as error:
        if _is_final(error) or not known.is_file():
            raise
        return known.read_text().strip()
    # A download by commit does not write this. Without it a new revision could not use the cache.
    with contextlib.suppress(OSError):
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(commit)
    return commit


def _listing(name: HubName) -> list[RemoteFile]:
    """Lists the files; empty when the hub does not answer. The download itself fails then if the cache lacks one."""
    try:
        return list_files(name)
    except Exception as error:  # noqa: BLE001 - the hub's client lets errors of several HTTP libraries through
        print(f"the hub's list of files is not available: {error}", file=sys.stderr)
        return []


def _acquire(lock: TextIO) -> None:
    """Waits for the lock, and sends progress meanwhile. It is free again when the file is closed or its process has ended."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            send(FetchProgress(waiting=True))
            time.sleep(LOCK_SECONDS)
        else:
            return


@contextlib.contextmanager
def _watched(blobs: Path, files: list[RemoteFile]) -> Iterator[None]:
    """Sends meanwhile how many bytes are in the cache."""
    total = sum(file.size for file in files)
    done = threading.Event()

    def report() -> None:
        while True:
            send(FetchProgress(bytes_in_cache(blobs, files), total))
            if done.wait(REPORT_SECONDS):
                return

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _verify_progress(total: int) -> Callable[[int], None]:
    """Sends progress for the first bytes, the last ones, and every REPORT_SECONDS."""
    sent = -REPORT_SECONDS

    def on_read(read: int) -> None:
        nonlocal sent
        now = time.monotonic()
        if now - sent >= REPORT_SECONDS or read == total:
            sent = now
            send(FetchProgress(read, total, verifying=True))

    return on_read


def send(message: FetchMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        action = resolve if sys.argv[3:] == ["resolve"] else fetch
        send(Fetched(str(action(sys.argv[1], Path(sys.argv[2])))))
    except NodeFailure as failure:
        send(FetchFailed(str(failure), failure.fatal))
    except ModelError as error:
        send(FetchFailed(str(error), _is_final(error)))
    # A plain return would wait for threads of the hub's client, which may hang.
    os._exit(0)


def _is_final(error: ModelError) -> bool:
    """True when the hub itself refused; anything else may be the network's fault."""
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error.__cause__, RemoteEntryNotFoundError | RepositoryNotFoundError | RevisionNotFoundError)


if __name__ == "__main__":
    main()
