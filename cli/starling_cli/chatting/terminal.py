"""Shows a chat to a person, dimmed where it is not the answer, or writes the answer alone into a pipe."""

import re
import sys

import typer
from starling_agent.parsers.events import Content, Reasoning

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Display:
    """Standard output. `is_person`: both it and the input are a terminal, so that somebody reads and answers."""

    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty() and sys.stdout.isatty()
        self._styles = sys.stdout.isatty()
        self._last: type[Content | Reasoning] | None = None

    def show(self, piece: Content | Reasoning) -> None:
        """Shows a piece of an answer. Reasoning is for a person alone: it is not the answer that a pipe wants."""
        if not self._styles:
            if isinstance(piece, Content):
                typer.echo(piece.text, nl=False)
                self._last = Content
            return
        if self._last is Reasoning and isinstance(piece, Content):
            typer.echo()
        self._last = type(piece)
        typer.secho(harmless(piece.text), dim=isinstance(piece, Reasoning), nl=False)

    def end_line(self, *, is_prompt: bool = False) -> None:
        """Ends the line of what `show` has shown, or of a prompt that got no answer."""
        if self._last is not None or is_prompt:
            typer.echo()
        self._last = None

    def line(self, text: str) -> None:
        """Shows a line that a pipe gets as it is."""
        typer.echo(harmless(text) if self._styles else text)

    def note(self, text: str) -> None:
        """Shows a line that is no part of an answer."""
        typer.secho(harmless(text), dim=True)

    def error(self, text: str) -> None:
        self.end_line()
        typer.secho(f"error: {harmless(text)}", fg=typer.colors.RED, err=True)


def harmless(text: str) -> str:
    """Replaces control characters: those that move the cursor could hide which program a person is asked to run."""
    return _CONTROL.sub("\ufffd", text)
