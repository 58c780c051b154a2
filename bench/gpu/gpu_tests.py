"""The tests that run on the GPU which is here: of the kernels, the same functions that run in Triton's interpreter elsewhere, and
those of what a CPU can only stand in for.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator

from bench.gpu.keep import ROOT, junit_file
from bench.gpu.table import Row

ENGINE = "tests/engine"
TESTS = (
    f"{ENGINE}/kernels",
    f"{ENGINE}/parallel/test_nccl.py",
    f"{ENGINE}/kv_offload/test_arena.py",
    f"{ENGINE}/kv_offload/test_copies.py",
    f"{ENGINE}/worker/test_memory.py",
    f"{ENGINE}/worker/test_on_gpu.py",
    f"{ENGINE}/worker/test_sleeper.py",
)
ALONE = f"{ENGINE}/kernels/test_peer_sums_ranks.py"
NOT_HERE = ("-k", "not compile and not peer_sums_ranks")
"""Tests that look at compiled code run without a GPU."""
TOY = "tests/bench/test_gpu_table.py"
SECONDS, ALONE_SECONDS = 250.0, 40.0
"""Less than the section has, so that it can say how far it came."""
WARNINGS = ("-W", "default::DeprecationWarning", "-W", "default::UserWarning")
"""Of other versions of torch and triton than ours they are no fault; everywhere else they are errors."""
MOST_AT_ONCE = 12
"""Processes, each with a CUDA context of half a gigabyte."""
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|warnings?|deselected)")


def rows(*, toy: bool) -> Iterator[Row]:
    """Raises SystemExit after its figures when a test failed. Pytest's own words go to the error stream, as they come."""
    # Compiling is most of the work, and the CPU's.
    tests = [TOY] if toy else [*TESTS, *NOT_HERE, "-n", str(min(MOST_AT_ONCE, os.cpu_count() or 1))]
    outcome = yield from _run(tests, SECONDS)
    if not toy:
        # Two kernels that wait for each other: alone, for among other processes one may wait long for its turn.
        outcome |= yield from _run([ALONE], ALONE_SECONDS)
    if outcome:
        sys.exit("tests failed; log.txt and junit.xml have their words")


def _run(tests: list[str], seconds: float) -> Generator[Row, None, int]:
    """Yields the counts; returns the exit status, which is not 0 where nothing passed."""
    junit = junit_file().with_name("junit-alone.xml") if ALONE in tests else junit_file()
    options = ["-v", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={junit}", *WARNINGS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment,
    ) as process:  # fmt: skip
        timer = threading.Timer(seconds, process.send_signal, (signal.SIGINT,))  # for which pytest still writes its report
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line)
        code, late = process.wait(), not timer.is_alive()
        timer.cancel()
    counts = parse_counts("".join(lines))
    for what, count in counts.items():
        yield Row(f"tests {what}{', alone' if ALONE in tests else ''}", str(count))
    if late:
        yield Row("tests", f"out of time after {seconds:.0f} s")
    return code or int(not counts.get("passed"))


def parse_counts(output: str) -> dict[str, int]:
    """From pytest's last line, "3 failed, 40 passed, 2 skipped in 12.34s"."""
    last = next((line for line in reversed(output.splitlines()) if " in " in line and _COUNT.search(line)), "")
    return {what: int(count) for count, what in _COUNT.findall(last)}
