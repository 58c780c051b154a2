"""One side of a comparison: a program that stays for all turns, and is stopped while it is the other's."""

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Self


class Side:
    """Runs a program that prints a number when it is ready, and one for each line that it reads. It may print other lines, too.

    Between questions the program and its children are stopped, for some spin while they wait.
    """

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        """Starts the program and waits for it. Raises ChildProcessError where it ends before it is ready."""
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.first = self._answer()
        """The line that the program printed when it was ready."""

    def ask(self, question: str = "") -> float:
        """Returns the answer to a line. Raises ChildProcessError where the program has ended."""
        assert self._child.stdin is not None
        self._signal(signal.SIGCONT)
        self._child.stdin.write(f"{question}\n")
        self._child.stdin.flush()
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._child.communicate()

    def _answer(self) -> float:
        """Reads lines up to one that is a number."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            try:
                found = float(line)
            except ValueError:
                continue
            self._signal(signal.SIGSTOP)
            return found
        raise ChildProcessError(f"{self._child.args!r} has ended")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._child.pid, number)
