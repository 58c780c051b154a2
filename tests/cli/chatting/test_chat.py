"""`starling chat` in a pipe, at a terminal, and with the real server."""

import codecs
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from tests.agent.test_tools import ONE, WEATHER
from tests.cli.chatting.recorded_server import ERROR, STALL, recorded_server, stream
from tests.cli.commands.running import REPOSITORY, starling

END_OF_INPUT = "\x04"
NOW = stream({"content": "It is noon."})


def call(name, call_id, arguments="{}"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_of(*calls):
    return stream({"reasoning_content": "Hm."}, {"tool_calls": [{"index": i, **one} for i, one in enumerate(calls)]})


@pytest.fixture
def tools(tmp_path):
    """A file with a tool that a program carries out, and one that a person does."""
    program = [sys.executable, "-c", "import json, sys; print(json.load(sys.stdin)['city'] + ': rain')", "\x1b[2K"]
    weather = {"type": "function", "function": {"name": "weather"}, "command": program}
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([weather, {"type": "function", "function": {"name": "time"}}]))
    return file


# ---- in a pipe ----


def test_calls_in_a_pipe_are_lines_of_json(tools):
    calls = [call("weather", "a", '{"city": "Zürich"}'), call("time", "b")]
    with recorded_server([calls_of(*calls)]) as (url, bodies):
        answer = starling("chat", "--url", url, "--tools", tools, "--yes", input="Well?\nIs never sent.\n")
    assert answer.returncode == 0, answer.stderr
    assert [json.loads(line) for line in answer.stdout.splitlines()] == calls
    assert [list(tool) for tool in bodies[0]["tools"]] == [["type", "function"]] * 2
    assert len(bodies) == 1


def test_programs_answer_in_a_pipe(tools):
    with recorded_server([calls_of(call("weather", "a", '{"city": "Zürich"}')), NOW]) as (url, bodies):
        answer = starling("chat", "--url", url, "--tools", tools, "--yes", "Well?")
    assert (answer.stdout, answer.returncode) == ("It is noon.\n", 0)
    assert bodies[1]["messages"][-1] == {"role": "tool", "tool_call_id": "a", "content": "Zürich: rain"}


def test_a_file_of_tools_that_is_wrong(tmp_path):
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    answer = starling("chat", "--tools", tmp_path / "tools.json", "Well?")
    assert answer.returncode == 1
    assert "tools[0].function" in answer.stderr


def test_slash_commands(tmp_path):
    saved, lines = tmp_path / "chat.json", ["/help", "/system Be short.", "When?", "//x", "/clear", "/model", "/history"]
    lines += [f"/load {saved}", "/model second", "/retry", "/history", f"/save {saved}", "/exit", "Is never sent."]
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    saved.write_text(json.dumps(messages))
    with recorded_server([NOW, NOW, stream({"content": "Thus."})]) as (url, bodies):
        answer = starling("chat", "--url", url, input="\n".join(lines))
    assert answer.returncode == 0, answer.stderr
    assert [body["messages"][-1]["content"] for body in bodies] == ["When?", "/x", "Why?"]
    assert bodies[1]["messages"][0] == {"role": "system", "content": "Be short."}
    assert [body["model"] for body in bodies] == ["first", "first", "second"]
    assert "* first\n  second\nsystem: Be short.\nThus.\nuser: Why?\nassistant: Thus.\n" in answer.stdout
    assert json.loads(saved.read_text()) == [messages[0], {"role": "assistant", "content": "Thus."}]


@pytest.mark.parametrize(
    ("line", "message"),
    [("/halp", "/help"), ("/retry", "no question"), ("/load /nonexistent", "No such file"), ("/model third", "no model 'third'")],
)
def test_a_command_that_fails_ends_a_script(line, message):
    with recorded_server([]) as (url, _):
        answer = starling("chat", "--url", url, input=f"{line}\n/help\n")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert message in answer.stderr


CALLED = '[{"role": "assistant", "tool_calls": %s}]'


@pytest.mark.parametrize(
    "content",
    ["{", '"text"', '[{"content": "Why?"}]', '[{"role": "king"}]', CALLED % "[{}]", CALLED % '[{"function": {"name": "f"}}]'],
)
def test_a_file_that_is_no_conversation(tmp_path, content):
    (tmp_path / "chat.json").write_text(content)
    with recorded_server([]) as (url, _):
        answer = starling("chat", "--url", url, input=f"/load {tmp_path / 'chat.json'}\n")
    assert answer.returncode == 1
    assert "chat.json is no" in answer.stderr


def test_what_a_server_sends_moves_no_cursor():
    gone = 'data: {"error": {"message": "gone\\u001b[2K"}}\n\n'
    with recorded_server([gone], models=["first\x1b[2K"]) as (url, _):
        answer = starling("chat", "--url", url, input="/model\nWell?\n")
    assert (answer.returncode, answer.stdout) == (1, "* first\ufffd[2K\n")
    assert "gone\ufffd[2K" in answer.stderr


def interruptible():
    """Undoes what a shell does to its jobs in the background: they ignore Ctrl-C, and so do their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_a_script():
    command = [sys.executable, "-m", "starling_cli.main", "chat", "--url"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        recorded_server([stream({"content": "It is"}).removesuffix("data: [DONE]\n\n") + STALL]) as (url, bodies),
        subprocess.Popen([*command, url], cwd=REPOSITORY, preexec_fn=interruptible, **pipes) as script,
    ):
        assert script.stdin and script.stdout
        script.stdin.write(b"Well?\nIs never sent.\n")
        script.stdin.flush()
        assert script.stdout.read(5) == b"It is"
        script.send_signal(signal.SIGINT)
        assert script.wait(20) == 130
    assert len(bodies) == 1


# ---- at a terminal ----


class Terminal:
    """`starling chat` at a terminal. `read_until` returns what it has shown up to some text."""

    def __init__(self, *arguments, state, stdin=None):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "starling_cli.main", "chat", *map(str, arguments)]
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "dumb", "COLUMNS": "200"}
        streams = {"stdin": theirs if stdin is None else stdin, "stdout": theirs, "stderr": theirs}
        settings = {"cwd": REPOSITORY, "env": environment, "start_new_session": True, "preexec_fn": interruptible}
        self.process = subprocess.Popen(command, **settings, **streams)
        os.close(theirs)
        self._terminal = ours
        self._decoded = codecs.getincrementaldecoder("utf-8")().decode
        self._unread = ""

    def write(self, line):
        os.write(self._terminal, line.encode() + (b"" if line == END_OF_INPUT else b"\n"))

    def read_until(self, text, seconds=60):
        end = time.monotonic() + seconds
        while text not in self._unread:
            assert select.select([self._terminal], [], [], max(0, end - time.monotonic()))[0], self._unread
            self._unread += self._decoded(os.read(self._terminal, 4096))
        before, _, self._unread = self._unread.partition(text)
        return before + text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@contextmanager
def terminal(*arguments, **options):
    opened = Terminal(*arguments, **options)
    try:
        yield opened
    finally:
        opened.close()


def test_a_person_plays_a_tool_and_allows_another(tools, tmp_path):
    calls = [call("time", "b", '{"zone": "CET\x1b[2K"}'), call("weather", "a", '{"city": "Bern"}')]
    streams = [calls_of(*calls), calls_of(calls[1]), NOW, ERROR, NOW]
    with recorded_server(streams) as (url, bodies), terminal("--url", url, "--tools", tools, state=tmp_path) as person:
        person.read_until("> ")
        person.write("Well?")
        shown = person.read_until("result> ")
        assert "\x1b[2mHm.\x1b[0m" in shown
        assert '\x1b[2mtime {"zone": "CET\ufffd[2K"}\x1b[0m' in shown, "what a model writes moves no cursor"
        person.write("noon")
        shown = person.read_until("[y/N] ")
        assert 'weather {"city": "Bern"}' in shown
        assert shown.endswith(" '\ufffd[2K'? [y/N] "), "nor does what a file of tools has"
        person.write("y")
        assert "Bern: rain" in person.read_until("[y/N] ")
        person.write("")
        person.read_until("It is noon.")
        person.read_until("> ")
        person.write("And now?")
        assert "the engine is gone" in person.read_until("> ")
        person.write("/exit")
        assert person.process.wait(20) == 0
    results = [message for message in bodies[2]["messages"] if message["role"] == "tool"]
    assert [message["content"] for message in results] == ["noon", "Bern: rain", "error: the user did not allow this call"]
    history = tmp_path / "starling" / "history"
    assert history.read_text().splitlines() == ["Well?", "And now?", "/exit"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_or_ctrl_d_end_a_turn_and_then_the_chat(tools, tmp_path):
    streams = [stream({"content": "It is"}).removesuffix("data: [DONE]\n\n") + STALL, calls_of(call("time", "b")), NOW]
    with recorded_server(streams) as (url, bodies), terminal("--url", url, "--tools", tools, state=tmp_path) as person:
        person.read_until("> ")
        person.write("Well?")
        person.read_until("It is")
        person.process.send_signal(signal.SIGINT)
        assert "stopped" in person.read_until("> ")
        person.write("Well then?")
        person.read_until("result> ")
        person.write(END_OF_INPUT)
        assert "stopped" in person.read_until("> ")
        person.write("Again?")
        person.read_until("It is noon.")
        person.read_until("> ")
        person.write(END_OF_INPUT)
        assert person.process.wait(20) == 0
    assert [message["content"] for message in bodies[2]["messages"]] == ["Again?"]


def test_calls_that_are_printed_at_a_terminal_move_no_cursor(tmp_path):
    with (
        recorded_server([calls_of(call("time", "b", '{"zone": "\x9b2K"}'))]) as (url, _),
        terminal("--url", url, "Well?", state=tmp_path, stdin=subprocess.DEVNULL) as shown,
    ):
        assert '{\\"zone\\": \\"\ufffd2K\\"}' in shown.read_until("}}")


# ---- with the real server ----


@contextmanager
def forced(url, outputs):
    """Passes requests on to the server, and has it write one output after the other."""
    left = list(outputs)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(httpx.get(f"{url}{self.path}"))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["structured_outputs"] = {"choice": [left.pop(0)]}
            self._send(httpx.post(f"{url}{self.path}", json=body, timeout=120))

        def _send(self, answer):
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()
        thread.join()


def test_the_server_takes_what_the_chat_sends(tools_server, tmp_path):
    """A call with reasoning, its result, and an answer: all of it goes back to the server in the second and third request."""
    file, saved = tmp_path / "tools.json", tmp_path / "chat.json"
    program = [sys.executable, "-c", "import json, sys; print(json.load(sys.stdin)['city'], 'has rain')"]
    file.write_text(json.dumps([WEATHER | {"command": program}]))
    outputs = [f"<think>\nHm.\n</think>\n\n{ONE}", "<think>Rain.</think>It rains.", "Yes."]
    with forced(tools_server.url, outputs) as url:
        answer = starling(
            "chat", "--url", url, "--tools", file, "--yes", "--max-tokens", "400", input=f"Weather?\nSure?\n/save {saved}\n"
        )
    assert (answer.stdout, answer.returncode) == ("It rains.\nYes.\n", 0), answer.stderr
    messages = json.loads(saved.read_text())
    (made,) = messages[1].pop("tool_calls")
    assert json.loads(made["function"]["arguments"]) == {"city": "Zürich"}
    assert messages == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": made["id"], "content": "Zürich has rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
