"""The tests that run on the GPU which is here: of the kernels, the same functions that run in Triton's interpreter elsewhere, and
those of what a CPU can only stand in for.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.table import Row

ROOT = Path(__file__).parents[2]
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
TOY = "tests/bench/test_gpu_table.py"
SECONDS = 280.0
"""Less than the section has, so that it can say how far it came."""
WARNINGS = ("-W", "default::DeprecationWarning", "-W", "default::UserWarning")
"""Of other versions of torch and triton than ours they are no fault; everywhere else they are errors."""
MOST_AT_ONCE = 12
"""Processes, each with a CUDA context of half a gigabyte."""
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|warnings?|deselected)")


def rows(*, toy: bool) -> Iterator[Row]:
    """Raises SystemExit after its figures when a test failed, with pytest's own words on the error stream."""
    # Compiling is most of the work, and the CPU's.
    tests = [TOY] if toy else [*TESTS, "-n", str(min(MOST_AT_ONCE, os.cpu_count() or 1))]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", *WARNINGS, *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        yield Row("tests", "out of time")
        sys.exit(f"not done in {SECONDS:.0f} s; the last of it:\n{(late.stdout or b'').decode(errors='replace')[-6000:]}")
    counts = parse_counts(done.stdout)
    for what, count in counts.items():
        yield Row(f"tests {what}", str(count))
    if done.returncode or not counts.get("passed"):
        sys.exit(f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}")


def parse_counts(output: str) -> dict[str, int]:
    """From pytest's last line, "3 failed, 40 passed, 2 skipped in 12.34s"."""
    last = next((line for line in reversed(output.splitlines()) if " in " in line and _COUNT.search(line)), "")
    return {what: int(count) for count, what in _COUNT.findall(last)}
