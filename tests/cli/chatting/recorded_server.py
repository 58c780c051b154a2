"""A server that answers each request with the next of some streams, and remembers what it was asked."""

import json
from collections.abc import Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread


def stream(*deltas):
    """Returns the events of an answer; a text is one that is sent as it is."""
    chunks = [json.dumps({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])


STALL = "stall"
"""Ends a stream that does not go on, though its connection stays open."""
ERROR = 'data: {"error": {"message": "the engine is gone"}}\n\n'


@contextmanager
def recorded_server(streams: Sequence[str], models: Sequence[str] = ("first", "second")):
    """Yields (url, bodies of the requests)."""
    left, bodies, ended = list(streams), [], Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/v1/models"
            self._send("application/json", json.dumps({"data": [{"id": name} for name in models]}))

        def do_POST(self):
            assert self.path == "/v1/chat/completions"
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send("text/event-stream", left.pop(0))

        def _send(self, kind, text):
            data = text.removesuffix(STALL).encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(data)
            if text.endswith(STALL):
                ended.wait(60)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
