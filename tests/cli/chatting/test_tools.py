"""Files of tools, and the programs of those that have one."""

import json
import sys
import time

import pytest
from starling_cli.chatting.programs import MOST_BYTES, run_tool
from starling_cli.chatting.tools import BadTools, read_tools

SIZE = {
    "type": "function",
    "function": {"name": "size", "description": "Says it.", "parameters": {"type": "object"}, "strict": True},
}
LIST = {"type": "function", "function": {"name": "list"}, "command": ["ls", "-l"]}


@pytest.mark.parametrize("content", [[SIZE, LIST], {"tools": [SIZE, LIST]}], ids=["list", "object"])
def test_the_server_gets_no_command(tmp_path, content):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(content))
    tools = read_tools(file)
    assert tools.specs == [SIZE, {"type": "function", "function": {"name": "list"}}]
    assert tools.commands == {"list": ["ls", "-l"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"tool": []}', "list"),
        ("[3]", r"tools\[0\]: "),
        ('[{"type": "function"}]', r"tools\[0\]\.function: Field required"),
        ('[{"type": "custom", "function": {"name": "f"}}]', r"tools\[0\]\.type: .*'function'"),
        ('[{"type": "function", "function": {"name": ""}}]', r"tools\[0\]\.function\.name: "),
        (json.dumps([SIZE | {"command": "ls -l"}]), r"tools\[0\]\.command: .*list"),
        (json.dumps([SIZE | {"command": []}]), r"tools\[0\]\.command: "),
        (json.dumps([SIZE, LIST, SIZE]), "several tools have the name 'size'"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, content, message):
    file = tmp_path / "tools.json"
    file.write_text(content)
    with pytest.raises(BadTools, match=message):
        read_tools(file)


def test_a_missing_file(tmp_path):
    with pytest.raises(BadTools, match="no-such"):
        read_tools(tmp_path / "no-such.json")


def python(code):
    return [sys.executable, "-c", f"import sys, json, time, os\n{code}"]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(json.load(sys.stdin)['city'].upper())", "ZÜRICH"),
        ("pass", ""),
        ("print('half'); sys.exit(3)", f"error: {sys.executable} ended with status 3\nhalf"),
        ("sys.stdout.buffer.write(b'\\xff')", "\ufffd"),
        ("while True: print('x' * 1000)", f"error: {sys.executable} wrote more than {MOST_BYTES} bytes"),
    ],
    ids=["result", "nothing", "failure", "no text", "endless"],
)
def test_results_of_programs(code, result):
    assert run_tool(python(code), '{"city": "Zürich"}') == result


@pytest.mark.parametrize("code", ["time.sleep(60)", "os.fork() or time.sleep(60)", "os.close(1); time.sleep(60)"])
def test_a_program_that_does_not_end_is_ended(code):
    began = time.monotonic()
    assert "took longer than 0.5 s" in run_tool(python(code), "{}", seconds=0.5)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("arguments", "message"), [("{", "no JSON"), ("[1]", "no JSON object")])
def test_a_program_gets_only_an_object(arguments, message):
    assert message in run_tool(["/nonexistent"], arguments)


def test_a_program_that_is_not_there():
    assert run_tool(["/nonexistent"], "{}") == "error: /nonexistent cannot be started: No such file or directory"
