"""Which lines of a conversation are questions, and which are commands?"""

import pytest
from starling_cli.chatting.slash_commands import COMMANDS, BadCommand, Question, SlashCommand, help_text, parse_line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        ("   ", None),
        (" What is a list? ", Question("What is a list?")),
        ("//etc/hosts, what is it?", Question("/etc/hosts, what is it?")),
        ("///", Question("//")),
        ("a /help b", Question("a /help b")),
        ("/help", SlashCommand("help")),
        (" /clear ", SlashCommand("clear")),
        ("/system  You are  terse.", SlashCommand("system", "You are  terse.")),
        ("/save my chat.json", SlashCommand("save", "my chat.json")),
        ("/model", SlashCommand("model")),
        ("/model org/name", SlashCommand("model", "org/name")),
        ("/retry", SlashCommand("retry")),
        ("/exit", SlashCommand("exit")),
    ],
)
def test_lines(line, expected):
    assert parse_line(line) == expected


@pytest.mark.parametrize("line", ["/halp", "/", "/etc/hosts is what?", "/HELP"])
def test_an_unknown_command_names_those_that_exist(line):
    with pytest.raises(BadCommand) as error:
        parse_line(line)
    assert all(f"/{name}" in str(error.value) for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("/system", "/system TEXT"),
        ("/save", "/save FILE"),
        ("/load ", "/load FILE"),
        ("/clear all", "/clear"),
        ("/exit 1", "/exit"),
    ],
)
def test_a_wrong_argument_says_how_it_is_written(line, written):
    with pytest.raises(BadCommand, match=rf"written {written}$"):
        parse_line(line)


def test_help_has_each_command_in_a_line():
    assert [line.split()[0] for line in help_text().splitlines()] == [*(f"/{name}" for name in COMMANDS), "//..."]
