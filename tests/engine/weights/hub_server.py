"""A stand-in for the Hugging Face hub: the routes that snapshot_download calls, over a folder, on a local port."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `folder` as repository org/name, branch "main" and tag "v1"; org/gated needs terms accepted."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.downloads: list[str] = []
        self.lookups = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_server(folder: Path) -> Iterator[HubServer]:
    with HubServer(folder) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _answer(self, body: bool) -> None:
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "models", "org", "gated", *_]:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
            case ["api", "models", "org", "name", "revision", revision]:
                self.server.lookups += 1
                if revision in ("main", "v1", COMMIT):
                    self._send_json({"id": "org/name", "sha": COMMIT, "siblings": []}, body)
                else:
                    self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
            case ["api", "models", "org", "name", "tree", str(commit)] if commit == COMMIT:
                self._send_json(self._tree(), body)
            case ["org", "name", "resolve", _, *path] if not (self.server.folder / "/".join(path)).is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            case ["org", "name", "resolve", revision, *path] if revision in ("main", "v1", COMMIT):
                self._send_file("/".join(path), body)
            case _:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def _tree(self) -> list[dict[str, object]]:
        files = (path for path in sorted(self.server.folder.rglob("*")) if path.is_file())
        return [
            {
                "type": "file",
                "path": path.relative_to(self.server.folder).as_posix(),
                "size": path.stat().st_size,
                "oid": _etag(path.read_bytes()),
            }
            for path in files
        ]

    def _send_file(self, name: str, body: bool) -> None:
        content = (self.server.folder / name).read_bytes()
        if body:
            self.server.downloads.append(name)
        self._send(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}, body)

    def _send_json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
