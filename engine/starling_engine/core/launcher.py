"""Starts an engine core process and watches it. Imports no torch."""

import logging
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from starling_engine.config import EngineConfig
from starling_engine.errors import ConfigError, EngineDead, ModelError, StarlingError, UnsupportedModel, WeightError
from starling_engine.ipc import child
from starling_engine.ipc.log_lines import EXIT_LOGGER, parse_line


class CoreStart(msgspec.Struct):
    """All that a core's process has to know, one line of JSON on its standard input.

    `host` is as for `CoreHandle`. `log_level` is that of the core's loggers: a process that is started ahead cannot know it.
    """

    address: str
    host: str | None
    config: EngineConfig
    log_level: int


AHEAD = "ahead"
"""Argument of a process that imports torch before it knows what for."""
_ahead: list[subprocess.Popen[bytes]] = []


def start_ahead() -> None:
    """Starts the process of the next core of this process. While its config is found, it imports torch.

    It ends with this process, also if no core comes: at once by `end_ahead`.
    """
    _ahead.append(_start_process(AHEAD))


def end_ahead() -> None:
    """Ends the processes that were started ahead and not used."""
    while _ahead:
        process = _ahead.pop()
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stderr is not None
        process.stdin.close()
        process.stderr.close()


def _next_process() -> subprocess.Popen[bytes]:
    """Returns one that was started ahead, if it still lives, or a new one."""
    if _ahead and _ahead[-1].poll() is None:
        return _ahead.pop()
    end_ahead()
    return _start_process()


def _start_process(*arguments: str) -> subprocess.Popen[bytes]:
    return child.start("starling_engine.core", *arguments, stderr=subprocess.PIPE)


class CoreHandle:
    """A running core process. Its log is repeated here, by the same loggers, and the last line is retained for errors."""

    def __init__(self, config: EngineConfig, host: str | None = None) -> None:
        """Starts the process. With `host`, an address of this machine, it also listens there (see `Hello.address`)."""
        self._folder = Path(tempfile.mkdtemp(prefix="starling-"))
        self.address = f"ipc://{self._folder}/core"
        self.rank = config.data_parallel_rank
        self._process = _next_process()
        self._cause: str | None = None
        self._last_line = "it left no message"
        assert self._process.stdin is not None
        # Left open: the core ends itself when this process, and with it the pipe, is gone.
        with suppress(BrokenPipeError):  # `exit_reason` says why it ended
            start = CoreStart(self.address, host, config, child.log_level())
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()
        self._relay = threading.Thread(target=self._relay_messages, daemon=True)
        self._relay.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_reason(self) -> str | None:
        """Returns why the core ended, in its own last words; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._relay.join(timeout=1)
        return self._cause or f"exit status {code}: {self._last_line}"

    def error(self, core: str) -> StarlingError:
        """Returns the error that ended the loading: ConfigError or ModelError as the core raised it, else EngineDead."""
        reason = self.exit_reason() or "it is still running"
        name, _, text = reason.partition(": ")
        kinds = {kind.__name__: kind for kind in (ConfigError, ModelError, UnsupportedModel, WeightError)}
        return kinds[name](text) if name in kinds else EngineDead(f"{core} did not start: {reason}")

    def close(self, timeout: float = 5.0) -> None:
        """Waits for the core to end by itself, then ends it."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None and self._process.stderr is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._relay.join(timeout=1)
        self._process.stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        self._process.kill()

    def _relay_messages(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = parse_line(raw)
            self._last_line = line.message
            if line.logger == EXIT_LOGGER:
                self._cause = line.message
            else:
                logging.getLogger(line.logger).log(logging.getLevelNamesMapping()[line.level], "%s", line.message)
