"""Questions and slash commands, line by line."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import typer
from starling_agent.client.bounded import BadAnswer

from starling_cli.chatting.client import AnswerError
from starling_cli.chatting.conversation import Conversation
from starling_cli.chatting.messages import message_line, read_messages
from starling_cli.chatting.slash_commands import BadCommand, Question, SlashCommand, help_text, parse_line
from starling_cli.chatting.terminal import Display, harmless


class Session:
    """A conversation at a prompt. Without a person an error ends it, as a failed question does in a script."""

    def __init__(self, talk: Conversation, display: Display, remember: Callable[[str], None]) -> None:
        """`remember` gets each line that was typed."""
        self._talk = talk
        self._display = display
        self._remember = remember
        self._is_over = False

    def run(self) -> None:
        """Reads lines up to their end, `/exit`, or a person's Ctrl-C at the prompt. Without a person Ctrl-C raises."""
        while not self._is_over:
            try:
                line = input("> " if self._display.is_person else "")
            except (EOFError, KeyboardInterrupt) as end:
                if isinstance(end, KeyboardInterrupt) and not self._display.is_person:
                    raise
                self._display.end_line(is_prompt=self._display.is_person)
                return
            if line.strip():
                self._remember(line)
            self._attempt(line)

    def _attempt(self, line: str) -> None:
        """Does what a line says; a person is told what failed, and goes on."""
        try:
            self.obey(parse_line(line))
        except (KeyboardInterrupt, EOFError):
            if not self._display.is_person:
                raise
            self._display.end_line(is_prompt=True)
            self._display.note("stopped; the conversation is as it was before")
        except (BadCommand, AnswerError, BadAnswer, httpx.HTTPError, OSError) as error:
            if not self._display.is_person:
                raise
            self._display.error(f"{'the server cannot be reached: ' if isinstance(error, httpx.HTTPError) else ''}{error}")

    def obey(self, said: Question | SlashCommand | None) -> None:
        """Raises BadCommand, OSError for a file, and as `Conversation.ask`."""
        match said:
            case Question(text):
                self._end_turn(self._talk.ask(text, self._display.show))
            case SlashCommand("help"):
                typer.echo(help_text())
            case SlashCommand("clear"):
                self._talk.clear()
            case SlashCommand("system", text):
                self._talk.set_system(text)
            case SlashCommand("history"):
                self._show_history()
            case SlashCommand("save", name):
                _file(name).write_text(json.dumps(self._talk.messages, ensure_ascii=False, indent=2) + "\n")
            case SlashCommand("load", name):
                self._talk.messages = read_messages(_file(name))
            case SlashCommand("model", name):
                self._model(name)
            case SlashCommand("retry"):
                self._retry()
            case SlashCommand("exit"):
                self._is_over = True

    def _retry(self) -> None:
        if not self._talk.has_question:
            raise BadCommand("there is no question yet")
        self._end_turn(self._talk.retry(self._display.show))

    def _end_turn(self, is_answered: bool) -> None:
        self._display.end_line()
        self._is_over = not is_answered

    def _show_history(self) -> None:
        for message in self._talk.messages:
            typer.echo(harmless(message_line(message)))

    def _model(self, name: str) -> None:
        names = self._talk.models()
        if not name:
            for one in names:
                typer.echo(f"{'*' if one == self._talk.model else ' '} {harmless(one)}")
        elif names and name not in names:
            raise BadCommand(f"there is no model {name!r}; /model lists them")
        else:
            self._talk.model = name


def _file(name: str) -> Path:
    return Path(name).expanduser()
