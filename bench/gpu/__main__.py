"""Runs sections, each in a process and within a time of its own, and writes what they found into the table of results."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.gpu.sections import SECTIONS
from bench.gpu.table import Row, merge, section

ROOT = Path(__file__).parents[2]
LEAST_SECONDS = 10.0
"""With less left, a section is not begun."""


def run_section(name: str, seconds: float, *, toy: bool) -> tuple[str, bool]:
    """The section's body, and whether it ended well. What it had found when it failed, or its time was over, is in it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, log = Path(folder, "found"), Path(folder, "log")
        found.touch()
        command = [sys.executable, "-m", "bench.gpu.one", name, str(found), *(["--toy"] if toy else [])]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stderr=errors, start_new_session=True, cwd=ROOT)
            error = _wait(process, seconds)
        sys.stderr.write(log.read_text(errors="replace"))
        machine, *rows = [json.loads(line) for line in found.read_text().splitlines()] or ["nothing is known of the machine"]
        if error is not None:
            error = f"{error}\n{_end(log.read_text(errors='replace'))}"
    heading = f"{time.strftime('%Y-%m-%d')}, {time.monotonic() - began:.0f} s. {machine}."
    return section(heading, [Row(**row) for row in rows], error), error is None


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """What went wrong, if anything did. Processes that it started and that are still there are ended with it."""
    try:
        code = process.wait(seconds)
        return f"exit status {code}" if code else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it took more than {seconds:.0f} s"


def _end(log: str) -> str:
    """The last lines, which say why."""
    return "\n".join(line for line in log.splitlines()[-12:] if line.strip())[-2000:]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all when none is named")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of them; those that do not fit are not begun")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU: shows that the script works, measures nothing")
    parser.add_argument("--results", type=Path, help="file to write; bench/results/gpu.md, or with --toy .cache/gpu-toy.md")
    arguments = parser.parse_args()
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(f"there is no section {name!r}; there are {', '.join(SECTIONS)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if not arguments.toy and shutil.which("nvidia-smi") is None:
        sys.exit("no NVIDIA GPU here (there is no nvidia-smi); --toy runs tiny sizes on the CPU")
    results = arguments.results or ROOT / (".cache/gpu-toy.md" if arguments.toy else "bench/results/gpu.md")
    results.parent.mkdir(parents=True, exist_ok=True)
    deadline, failed = time.monotonic() + arguments.seconds, []
    for name in arguments.sections or SECTIONS:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"## {name}\n\nNot begun: {arguments.seconds:.0f} s are over.\n", flush=True)
            failed.append(name)
            continue
        body, well = run_section(name, min(left, SECTIONS[name].seconds), toy=arguments.toy)
        print(f"## {name}\n\n{body}\n", flush=True)
        failed += [] if well else [name]
        _write(results, name, body)
    sys.exit(f"not run, or not to the end: {', '.join(failed)}" if failed else 0)


def _write(results: Path, name: str, body: str) -> None:
    """After each section, so that what was found is kept whatever comes next."""
    text = merge(results.read_text() if results.exists() else "", {name: body}, tuple(SECTIONS))
    results.write_text(text)
    if out := os.environ.get("OUT"):
        Path(out, results.name).write_text(text)


if __name__ == "__main__":
    main()
