"""Runs sections, each in a process and within a time of its own, and writes what they found into the table of results."""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.gpu.keep import KERNELS, ROOT, Rows, folder, log_file, pack_kernels, unpack_kernels
from bench.gpu.sections import GROUPS, SECTIONS, chosen
from bench.gpu.table import merge, section

LEAST_SECONDS = 10.0
"""With less left, a section is not begun."""
GRACE_SECONDS = 5.0
"""A section that is interrupted has so long to say where it was, and its tests to write what they know."""
POLL_SECONDS = 0.2

ended = threading.Event()
"""Set where the run is to end, by a signal. What was found is written all the same."""


def run_section(name: str, seconds: float, *, toy: bool) -> tuple[str, bool]:
    """The section's body, and whether it ended well. What it had found when it failed, or its time was over, is in it."""
    began, kept = time.monotonic(), Rows()
    rows_at, log_at = kept.size(), log_file().stat().st_size if log_file().exists() else 0
    command = [sys.executable, "-m", "bench.gpu.one", name, *(["--toy"] if toy else [])]
    with log_file().open("ab") as log:  # by the process itself: what it says is there whatever becomes of this one
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
        error = _wait(process, seconds)
    machine, rows = kept.since(rows_at)
    if error is not None:
        said = log_file().read_bytes()[log_at:].decode(errors="replace")
        error = f"{error}\n{_end(said)}"
    heading = f"{time.strftime('%Y-%m-%d')}, {time.monotonic() - began:.0f} s. {machine or 'Nothing is known of the machine'}."
    return section(heading, rows, error), error is None


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """What went wrong, if anything did. Processes that it started and that are still there are ended with it."""
    until = time.monotonic() + seconds
    while True:
        try:
            code = process.wait(POLL_SECONDS)
            return f"exit status {code}" if code else None
        except subprocess.TimeoutExpired:
            if ended.is_set() or time.monotonic() > until:
                _stop(process)
                return "the run was ended meanwhile" if ended.is_set() else f"it took more than {seconds:.0f} s"


def _stop(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end(log: str) -> str:
    """The last lines, which say why."""
    return "\n".join(line for line in log.splitlines()[-12:] if line.strip())[-2000:]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    words = f"of {', '.join(SECTIONS)}; or {', '.join(GROUPS)}, which stand for several; all when none is named"
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=words)
    parser.add_argument(
        "--seconds", type=float, help="for all of them; those that do not fit are not begun; a toy has as many as it needs"
    )
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU: shows that the script works, measures nothing")
    parser.add_argument("--results", type=Path, help="file to write; bench/results/gpu.md, or with --toy .cache/gpu-toy.md")
    parser.add_argument("--kernels", type=Path, help="kernels.tar.xz of another run: nothing is compiled that is in it")
    arguments = parser.parse_args()
    try:
        # A toy takes as long as it takes in the interpreter, and on its CPUs.
        seconds = math.inf if arguments.toy and arguments.seconds is None else arguments.seconds
        arguments.sections, arguments.seconds = chosen(arguments.sections, seconds)
    except KeyError as word:
        parser.error(f"there is no section {word}; there are {', '.join((*SECTIONS, *GROUPS))}")
    if arguments.kernels is not None and not arguments.kernels.is_file():
        parser.error(f"--kernels: there is no file {arguments.kernels}")
    return arguments


def main() -> None:
    began, arguments = time.monotonic(), parse_arguments()
    if not arguments.toy and shutil.which("nvidia-smi") is None:
        sys.exit("no NVIDIA GPU here (there is no nvidia-smi); --toy runs tiny sizes on the CPU")
    results = arguments.results or ROOT / (".cache/gpu-toy.md" if arguments.toy else "bench/results/gpu.md")
    results.parent.mkdir(parents=True, exist_ok=True)
    # Compiled kernels without the steps to them, so that they are few bytes.
    os.environ |= {"TRITON_CACHE_DIR": str(KERNELS), "TRITON_STORE_BINARY_ONLY": "1"}
    if arguments.kernels is not None:
        unpack_kernels(arguments.kernels)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda *_: ended.set())
    failed = []
    for name in arguments.sections:
        if ended.is_set():
            failed.append(name)
            continue
        left = began + arguments.seconds - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"## {name}\n\nNot begun: {arguments.seconds:.0f} s are over.\n", flush=True)
            failed.append(name)
            continue
        body, well = run_section(name, left if arguments.toy else min(left, SECTIONS[name].seconds), toy=arguments.toy)
        print(f"## {name}\n\n{body}\n", flush=True)
        failed += [] if well else [name]
        _write(results, name, body)
        pack_kernels()
    sys.exit(f"not run, or not to the end: {', '.join(failed)}" if failed else 0)


def _write(results: Path, name: str, body: str) -> None:
    """After each section, so that what was found is kept whatever comes next."""
    text = merge(results.read_text() if results.exists() else "", {name: body}, tuple(SECTIONS))
    results.write_text(text)
    (folder() / "gpu.md").write_text(text)


if __name__ == "__main__":
    main()
