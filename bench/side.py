"""One side of a comparison: a program that stays for all turns, and is stopped while it is the other's."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from processes import family

LONG_STOP, MEETING = 5.0, 2.0
"""An engine forgets a frontend of which it hears nothing for seconds. After a stop of so long, both get so long to meet again."""


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
        if time.monotonic() - self._stopped > LONG_STOP:
            time.sleep(MEETING)
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
            self._stopped = time.monotonic()
            return found
        raise ChildProcessError(f"{self._child.args!r} has ended")

    def _signal(self, number: signal.Signals) -> None:
        """An engine's processes have sessions of their own, so that a signal to the group would not reach them."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)
        for pid in family(self._child.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
