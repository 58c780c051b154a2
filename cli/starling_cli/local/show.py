"""Draws views: one table that updates in place on a terminal, a line for each change elsewhere, JSON lines for machines."""

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from starling_operator.plan.decision import Event

    from starling_cli.local.view import ServiceView

QUIET_SECONDS = 4.0
"""While it is not ready, nobody has to doubt for longer than five."""


class StatusDisplay(Protocol):
    """`view` may come often and unchanged; `beat` comes about once a second; `close` leaves the terminal as it was."""

    def note(self, text: str) -> None: ...
    def event(self, event: "Event") -> None: ...
    def view(self, view: "ServiceView") -> None: ...
    def beat(self) -> None: ...
    def close(self) -> None: ...


def make_show(as_json: bool) -> StatusDisplay:
    from rich.console import Console

    if as_json:
        return JsonShow(sys.stdout)
    console = Console(stderr=True, highlight=False)
    return TableShow(console) if console.is_terminal else LineShow(sys.stderr)


class JsonShow:
    """One object a line: {"time", "kind": note | event | status, ...}."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last: ServiceView | None = None

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        self._out.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **content}) + "\n")
        self._out.flush()

    def note(self, text: str) -> None:
        self._write("note", {"message": text})

    def event(self, event: "Event") -> None:
        self._write("event", {"type": event.type, "reason": event.reason, "message": event.message})

    def view(self, view: "ServiceView") -> None:
        if view != self._last:
            self._last = view
            self._write("status", asdict(view))

    def beat(self) -> None:
        """Machines do not doubt."""

    def close(self) -> None:
        self._out.flush()


class LineShow:
    """A line for each thing that changed, and a sign of life while it is not ready."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._told: dict[str, str] = {}
        self._told_at = time.monotonic()
        self._last: ServiceView | None = None

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()
        self._told_at = time.monotonic()

    def note(self, text: str) -> None:
        self._line(text)

    def event(self, event: "Event") -> None:
        self._line(f"{event.type.lower()} {event.reason}: {event.message}")

    def view(self, view: "ServiceView") -> None:
        self._last = view
        lines = {"": f"{view.service}: {view.headline}", "trouble": view.trouble}
        lines |= {row.pod: _describe(row) for row in view.rows}
        for key, text in lines.items():
            if text and self._told.get(key) != text:
                self._line(text)
        self._told = lines

    def beat(self) -> None:
        waiting = self._last is not None and not self._last.ready
        if waiting and self._last and time.monotonic() - self._told_at >= QUIET_SECONDS:
            pods = "; ".join(f"{row.pod} {row.phase} {row.progress}".strip() for row in self._last.rows) or "no pods"
            self._line(f"still {'draining' if self._last.stopping else 'waiting'}: {pods}")

    def close(self) -> None:
        self._out.flush()


def _describe(row: Any) -> str:
    """What of a pod is worth a line: its phase and its trouble, not each megabyte."""
    parts = [f"{row.pod}: {row.phase}", "ready" if row.ready else "", row.message]
    return " ".join(", ".join(part for part in parts if part).split())


class TableShow:
    """Drawn by rich in place, without a thread of its own: views and beats redraw it."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()
        self._view: ServiceView | None = None
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, style="dim")

    def event(self, event: "Event") -> None:
        style = "yellow" if event.type == "Warning" else "dim"
        self._console.print(f"{event.reason}: {event.message}", markup=False, style=style)

    def view(self, view: "ServiceView") -> None:
        self._view = view
        self.beat()

    def beat(self) -> None:
        if self._view is not None:
            self._live.update(_drawn(self._view, time.monotonic() - self._began), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _drawn(view: "ServiceView", seconds: float) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("POD", "PHASE", "PROGRESS", "READY", "RESTARTS", "STREAMS", "PORT", "MESSAGE"):
        table.add_column(name, overflow="fold" if name == "MESSAGE" else "ellipsis")
    for row in view.rows:
        cells = (row.pod, row.phase, row.progress, "yes" if row.ready else "no", row.restarts, row.streams, row.port, row.message)
        table.add_row(*(Text(str(cell)) for cell in cells))
    style = "green" if view.ready else "yellow" if view.stalled or view.trouble else ""
    head = [
        Text(f"{view.service}  {view.model}  groups {view.groups}  {seconds:.0f} s", style="bold"),
        Text(view.headline, style=style),
    ]
    foot = [Text(view.trouble, style="yellow")] if view.trouble else []
    return Group(*head, *foot, table, Text("ctrl-C drains and ends; again ends at once", style="dim"))
