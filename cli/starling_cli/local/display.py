"""Displays of `starling up`: a table that updates in place on a terminal, a line for each change elsewhere, JSON for machines."""

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from starling_operator.plan.decision import Event

    from starling_cli.local.status import LocalStatus

QUIET_SECONDS = 4.0
"""Seconds without a line, while the service is not ready, after which one says that it still waits."""


class StatusDisplay(Protocol):
    """Interface of the displays. `status` may come often and unchanged, `refresh` twice a second; `close` restores the terminal."""

    def note(self, text: str) -> None: ...
    def event(self, event: "Event") -> None: ...
    def status(self, status: "LocalStatus") -> None: ...
    def refresh(self) -> None: ...
    def close(self) -> None: ...


def make_display(as_json: bool) -> StatusDisplay:
    from rich.console import Console

    if as_json:
        return JsonDisplay(sys.stdout)
    console = Console(stderr=True, highlight=False)
    return TableDisplay(console) if console.is_terminal else LineDisplay(sys.stderr)


class JsonDisplay:
    """One object a line: {"time", "kind": note | event | status, ...}."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last: LocalStatus | None = None

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        self._out.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **content}) + "\n")
        self._out.flush()

    def note(self, text: str) -> None:
        self._write("note", {"message": text})

    def event(self, event: "Event") -> None:
        self._write("event", {"type": event.type, "reason": event.reason, "message": event.message})

    def status(self, status: "LocalStatus") -> None:
        if status != self._last:
            self._last = status
            self._write("status", asdict(status))

    def refresh(self) -> None:
        """Does nothing: a machine needs no sign of life."""

    def close(self) -> None:
        self._out.flush()


class LineDisplay:
    """A line for each change, and a sign of life while the service is not ready."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._printed: dict[str, str] = {}
        self._printed_at = time.monotonic()
        self._last: LocalStatus | None = None

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()
        self._printed_at = time.monotonic()

    def note(self, text: str) -> None:
        self._line(text)

    def event(self, event: "Event") -> None:
        self._line(f"{event.type.lower()} {event.reason}: {event.message}")

    def status(self, status: "LocalStatus") -> None:
        self._last = status
        lines = {"": f"{status.service}: {status.headline}", "trouble": status.trouble}
        lines |= {row.pod: _describe(row) for row in status.rows}
        for key, text in lines.items():
            if text and self._printed.get(key) != text:
                self._line(text)
        self._printed = lines

    def refresh(self) -> None:
        waiting = self._last is not None and not self._last.ready
        if waiting and self._last and time.monotonic() - self._printed_at >= QUIET_SECONDS:
            pods = "; ".join(f"{row.pod} {row.phase} {row.progress}".strip() for row in self._last.rows) or "no pods"
            self._line(f"still {'draining' if self._last.stopping else 'waiting'}: {pods}")

    def close(self) -> None:
        self._out.flush()


def _describe(row: Any) -> str:
    """Returns a pod's phase and trouble, but not its progress: each megabyte would be a new line."""
    parts = [f"{row.pod}: {row.phase}", "ready" if row.ready else "", row.message]
    return " ".join(", ".join(part for part in parts if part).split())


class TableDisplay:
    """A table that rich draws in place, without a thread of its own: `status` and `refresh` redraw it."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()
        self._status: LocalStatus | None = None
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, style="dim")

    def event(self, event: "Event") -> None:
        style = "yellow" if event.type == "Warning" else "dim"
        self._console.print(f"{event.reason}: {event.message}", markup=False, style=style)

    def status(self, status: "LocalStatus") -> None:
        self._status = status
        self.refresh()

    def refresh(self) -> None:
        if self._status is not None:
            self._live.update(_drawn(self._status, time.monotonic() - self._began), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _drawn(status: "LocalStatus", seconds: float) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("POD", "PHASE", "PROGRESS", "READY", "RESTARTS", "STREAMS", "PORT", "MESSAGE"):
        table.add_column(name, overflow="fold" if name == "MESSAGE" else "ellipsis")
    for row in status.rows:
        cells = (row.pod, row.phase, row.progress, "yes" if row.ready else "no", row.restarts, row.streams, row.port, row.message)
        table.add_row(*(Text(str(cell)) for cell in cells))
    style = "green" if status.ready else "yellow" if status.stalled or status.trouble else ""
    head = [
        Text(f"{status.service}  {status.model}  groups {status.groups}  {seconds:.0f} s", style="bold"),
        Text(status.headline, style=style),
    ]
    foot = [Text(status.trouble, style="yellow")] if status.trouble else []
    return Group(*head, *foot, table, Text("ctrl-C drains and ends; again ends at once", style="dim"))
