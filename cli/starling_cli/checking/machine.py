"""Checks whether this machine can run `starling serve` and `starling up`."""

import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from starling_cli.checking.finding import Finding, bad, good, note, verdict

SECTION = "this machine"
MIN_PYTHON = (3, 11)
MIN_MEMORY = 4 * 2**30


def check_machine() -> Iterator[Finding]:
    yield verdict(
        SECTION,
        "Python",
        sys.version_info >= MIN_PYTHON,
        platform.python_version(),
        f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer",
    )
    yield verdict(SECTION, "system", sys.platform == "linux", f"{platform.system()} {platform.machine()}", "use Linux")
    yield from check_limits()
    yield from check_kernels()


def check_limits() -> Iterator[Finding]:
    """Checks CPUs and memory, within the cgroup's limits, and /dev/shm."""
    from starling_engine.platforms.cgroup import cpu_limit, read_limits

    limits = read_limits()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = machine if limits.memory is None else min(machine, limits.memory)
    yield good(SECTION, "CPUs", f"{cpu_limit(limits)}")
    yield verdict(
        SECTION,
        "memory",
        memory >= MIN_MEMORY,
        f"{memory / 2**30:.1f} GiB",
        f"provide {MIN_MEMORY / 2**30:.0f} GiB or more, or set a small --kv-cache-memory-bytes",
    )
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    yield verdict(SECTION, "/dev/shm", shared >= 2**26, f"{shared / 2**20:.0f} MiB", "mount a tmpfs of 64 MiB or more there")


def check_kernels() -> Iterator[Finding]:
    """Checks that the engine is installed and runs with its native kernels. The first run builds them."""
    try:
        import torch
        from starling_engine.errors import ConfigError
        from starling_engine.native import instruction_set_name, load
    except ImportError as error:
        yield bad(SECTION, "engine", f"{error.name or error} is not installed", "pip install 'starling[agent]'")
        return
    yield good(SECTION, "engine", f"torch {torch.__version__}")
    reasons = _Reasons()
    logger = logging.getLogger("starling.native")
    logger.addHandler(reasons)
    try:
        native = load() is not None
    except ConfigError as error:
        yield bad(SECTION, "native CPU kernels", str(error), "take STARLING_CPU_ISA away, or name one of those")
        return
    finally:
        logger.removeHandler(reasons)
    if native:
        yield good(SECTION, "native CPU kernels", f"ready, {instruction_set_name()}")
    else:
        # The log's line begins with the finding's title.
        why = "; ".join(reason.removeprefix("native CPU kernels are ") for reason in reasons.seen) or "off"
        yield note(SECTION, "native CPU kernels", f"{why} (slower, but correct)")


class _Reasons(logging.Handler):
    """Collects the log line in which the engine says why it runs without native kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
