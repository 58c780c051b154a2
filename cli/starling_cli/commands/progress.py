"""Progress of `starling serve` while it loads: a spinner on a terminal, lines elsewhere, and never silence for long."""

import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from starling_agent.contract.listening import url_here

if TYPE_CHECKING:
    from starling_agent.openai.endpoint import Endpoint
    from starling_engine.core.messages import Loading

HEARTBEAT_SECONDS = 1.0
QUIET_SECONDS = 3.5
"""Longest time without a line. One heartbeat more is still under the five seconds after which people doubt."""


class StartReport:
    """Prints to standard error, from a thread of its own: a blocked event loop must not cause silence."""

    def __init__(self, model: str) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)  # a path that is a line is whole
        self._began = self._phase_began = self._printed_at = time.monotonic()
        self._phase = self._text = f"looking for {model}"
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._spinner = self._console.status(Text(self._phase)) if self._console.is_terminal else None
        self._thread = threading.Thread(target=self._print_heartbeats, daemon=True)

    def __enter__(self) -> "StartReport":
        if self._spinner is not None:
            self._spinner.start()
        else:
            self._console.print(Text(self._phase))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def phase(self, loading: "Loading") -> None:
        """Prints a new phase, or the next tenth of the current one."""
        text = _describe(loading)
        if text == self._text:
            return
        with self._lock:
            if loading.phase != self._phase:
                self._next_phase(loading.phase)
            self._text, self._printed_at = text, time.monotonic()
            if self._spinner is not None:
                self._spinner.update(Text(text))
            else:
                self._console.print(Text(text))

    def _next_phase(self, phase: str) -> None:
        now = time.monotonic()
        if self._spinner is not None:
            self._console.print(Text(f"  {self._phase} ({now - self._phase_began:.1f} s)", style="dim"))
        self._phase, self._phase_began = phase, now

    def serving(self, endpoint: "Endpoint", port: int) -> None:
        from starling_cli.commands.first_request import curl_line  # loads what has been loaded by now

        self._stop()
        host = endpoint.settings.host
        url = url_here(host, port)
        out = self._console
        if endpoint.engine.cores.ledger:
            out.print(Text(endpoint.engine.cores.ledger))
        out.print(Text(f"serving {', '.join(endpoint.names)} after {time.monotonic() - self._began:.1f} s at {url}/v1"))
        if host in ("0.0.0.0", "::") and not endpoint.settings.api_keys:
            out.print(Text("anybody who reaches this machine may use it: no --api-key was given", style="yellow"))
        out.print(Text(curl_line(url, endpoint)))

    def _stop(self) -> None:
        self._done.set()
        if self._spinner is not None:
            self._spinner.stop()

    def _print_heartbeats(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            with self._lock:
                now = time.monotonic()
                waited = f"{self._text} ({now - self._phase_began:.0f} s)"
                if self._spinner is not None and now - self._phase_began >= HEARTBEAT_SECONDS:
                    self._spinner.update(Text(waited))
                elif now - self._printed_at >= QUIET_SECONDS:
                    self._console.print(Text(f"still {waited}"))
                    self._printed_at = now


def _describe(loading: "Loading") -> str:
    if not loading.total:
        return loading.phase
    return f"{loading.phase}: {10 * (10 * loading.done // loading.total)} % of {loading.total / 2**20:.0f} MiB"
