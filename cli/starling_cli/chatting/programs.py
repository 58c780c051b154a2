"""Runs a tool's program within limits."""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress

SECONDS = 60.0
MOST_BYTES = 64 * 1024
"""Longest result of a program: all of it goes into the model's context."""


def run_tool(command: Sequence[str], arguments: str, seconds: float = SECONDS) -> str:
    """Returns what the program writes to its standard output, or a text that says how it failed. Its input is the arguments."""
    try:
        if not isinstance(json.loads(arguments), dict):
            return "error: the arguments are no JSON object"
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    try:
        return _output(command, arguments, seconds)
    except OSError as error:
        return f"error: {command[0]} cannot be started: {error.strerror}"


def _output(command: Sequence[str], arguments: str, seconds: float) -> str:
    with tempfile.TemporaryFile() as given:
        given.write(arguments.encode())
        given.seek(0)
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, start_new_session=True)
        late = threading.Event()

        def end_late() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, end_late)
        timer.start()
        assert process.stdout is not None
        try:
            data = process.stdout.read(MOST_BYTES + 1)
            if len(data) <= MOST_BYTES:
                process.wait()
        finally:  # Ctrl-C does not reach the program: it has a session of its own, so that its children end with it
            timer.cancel()
            _kill(process)
            process.wait()
            process.stdout.close()
    if late.is_set():
        return f"error: {command[0]} took longer than {seconds:g} s"
    return _result(command[0], data, process.returncode)


def _result(program: str, data: bytes, status: int) -> str:
    if len(data) > MOST_BYTES:
        return f"error: {program} wrote more than {MOST_BYTES} bytes"
    text = data.decode(errors="replace").rstrip("\n")
    return text if status == 0 else f"error: {program} ended with status {status}\n{text}".rstrip("\n")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
