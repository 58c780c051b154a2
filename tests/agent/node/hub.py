"""A fake Hugging Face hub with the hashes of the real one. It can be slow, silent or wrong."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 64 * 1024


class Hub(ThreadingHTTPServer):
    """Serves `folder` as org/name, of branch "main" and tag "v1"; org/gated has terms that are not accepted.

    delay      seconds before each 64 KiB of a file
    silences   number of next downloads of the weights that stop half way and hang
    corrupt    number of next downloads of the weights with wrong bytes
    moves      if set, the main branch gets a new commit each time that it is resolved
    moves_with_downloads   if set, it gets one after each download
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.downloads: list[str] = []
        self.lookups = 0
        """Questions for what a revision is."""
        self.tokens: set[str | None] = set()
        self.delay = 0.0
        self.silences = self.corrupt = 0
        self.moves = self.moves_with_downloads = False
        self.commits = [COMMIT]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    def _answer(self, body: bool) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "models", "org", "gated", *_]:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
            case ["api", "models", "org", "name"] | ["api", "models", "org", "name", "revision", "main" | "v1"]:
                self._send_revision(self._head(), body)
            case ["api", "models", "org", "name", "revision", commit]:
                self._send_revision(commit, body)
            case ["api", "models", "org", "name", "tree", _]:
                self._send_json(self._tree(), body)
            case ["org", "name", "resolve", revision, *path] if (self.server.folder / "/".join(path)).is_file():
                commit = revision if revision in self.server.commits else self.server.commits[-1]
                self._send_file("/".join(path), commit, body)
            case ["org", "name", "resolve", *_]:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            case _:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def _head(self) -> str:
        head = self.server.commits[-1]
        if self.server.moves:
            self._move()
        return head

    def _move(self) -> None:
        self.server.commits.append(f"{len(self.server.commits):040x}")

    def _send_revision(self, commit: str, body: bool) -> None:
        self.server.lookups += 1
        if commit in self.server.commits:
            self._send_json({"id": "org/name", "sha": commit, "siblings": []}, body)
        else:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)

    def _tree(self) -> list[dict[str, object]]:
        folder = self.server.folder
        return [{**_entry(path), "path": str(path.relative_to(folder))} for path in sorted(folder.rglob("*")) if path.is_file()]

    def _send_file(self, name: str, commit: str, body: bool) -> None:
        path = self.server.folder / name
        content, large = path.read_bytes(), path.suffix == ".safetensors"
        headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not body:
            self._send(200, content, headers, body=False)
            return
        self.server.downloads.append(name)
        if self.server.moves_with_downloads:
            self._move()
        start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]) if self.headers["Range"] else 0
        if large and self.server.corrupt:
            self.server.corrupt -= 1
            content = bytes(len(content))
        silent = large and self.server.silences > 0
        self.server.silences -= silent
        ranged = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        self._begin(206 if start else 200, len(content) - start, {**headers, **ranged})
        self._write(content[start : len(content) // 2] if silent else content[start:])
        if silent:
            time.sleep(60)

    def _write(self, content: bytes) -> None:
        for begin in range(0, len(content), PIECE):
            if self.server.delay:
                time.sleep(self.server.delay)
            try:
                self.wfile.write(content[begin : begin + PIECE])
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
                return

    def _send_json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self._begin(status, len(content), headers)
        if body:
            self._write(content)

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _entry(path: Path) -> dict[str, object]:
    content = path.read_bytes()
    entry: dict[str, object] = {"type": "file", "size": len(content), "oid": _git_hash(content)}
    if path.suffix == ".safetensors":
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _hash(path: Path) -> str:
    """Returns the hub's ETag: SHA-256 for large files, git's own hash for others."""
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest() if path.suffix == ".safetensors" else _git_hash(content)


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
