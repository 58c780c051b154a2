"""Reads a line of a conversation: a question, or a command that begins with a slash."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandUsage:
    """Describes how a command is written; `argument` is in brackets where it may be left out."""

    argument: str
    help: str


COMMANDS = {
    "help": CommandUsage("", "list the commands"),
    "clear": CommandUsage("", "forget the conversation, but for the system message"),
    "system": CommandUsage("TEXT", "put a system message in front, in place of the one before"),
    "history": CommandUsage("", "show the messages so far"),
    "save": CommandUsage("FILE", "write the messages as JSON"),
    "load": CommandUsage("FILE", "go on from messages that were saved"),
    "model": CommandUsage("[NAME]", "list the models, or go on with another one"),
    "retry": CommandUsage("", "ask the last question once more"),
    "exit": CommandUsage("", "end; so do Ctrl-D, and Ctrl-C at the prompt"),
}


@dataclass(frozen=True, slots=True)
class Question:
    text: str


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """`name` is one of COMMANDS; `argument` is empty where there is none."""

    name: str
    argument: str = ""


class BadCommand(ValueError):
    """A line that is neither; the message says what is possible."""


def parse_line(line: str) -> Question | SlashCommand | None:
    """Returns what a line says, None for an empty one. Of two slashes that begin a question one is left out. Raises BadCommand."""
    text = line.strip()
    if not text:
        return None
    if text.startswith("//"):
        return Question(text[1:])
    if not text.startswith("/"):
        return Question(text)
    name, _, argument = text[1:].partition(" ")
    return _checked(SlashCommand(name, argument.strip()))


def _checked(command: SlashCommand) -> SlashCommand:
    usage = COMMANDS.get(command.name)
    if usage is None:
        known = ", ".join(f"/{name}" for name in COMMANDS)
        raise BadCommand(f"there is no /{command.name}, but {known}; a question that begins with a slash is written with two")
    if bool(command.argument) != bool(usage.argument) and not usage.argument.startswith("["):
        raise BadCommand(f"it is written {usage_line(command.name)}")
    return command


def usage_line(name: str) -> str:
    return f"/{name} {COMMANDS[name].argument}".strip()


def help_text() -> str:
    width = max(len(usage_line(name)) for name in COMMANDS)
    lines = [f"{usage_line(name):{width}}  {usage.help}" for name, usage in COMMANDS.items()]
    return "\n".join([*lines, f"{'//...':{width}}  a question that begins with a slash"])
